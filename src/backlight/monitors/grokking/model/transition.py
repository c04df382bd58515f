"""The rise of the test accuracy: how sharp and how late it is, and signs that it is a recovery.

``way`` maps a share of the way from chance to plateau to the accuracy there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from backlight.monitors.grokking.model import curves
from backlight.monitors.grokking.model.curves import Curve
from backlight.monitors.grokking.model.verdicts import Transition

Way = Callable[[float], float]

HEIGHT_LOGS = 3
"""Logs of the medians that show a height, which before memorisation may last no longer."""

NOISE_SD = 3.0
"""Standard deviations by which a fall must exceed the counting noise of two accuracies."""


def transition_of(test: Curve, start: float, plateau: float, memorised: int, logs: int) -> Transition | None:
    """Return the rise of ``test`` from ``start`` to ``plateau``; None if it did not hold three quarters.

    ``start`` is the accuracy when the run memorised, at step ``memorised``. Each step is where the accuracy
    reached its level for the first time and held it for ``logs`` logs, interpolated between the two logs.
    What was reached before a fall counts: a rise in two parts is wide.
    """
    steps = [_passed(test, start + share * (plateau - start), logs) for share in (0.25, 0.5, 0.75)]
    quarter, half, three_quarters = steps
    if quarter is None or half is None or three_quarters is None:
        return None
    return Transition(
        quarter=quarter,
        half=half,
        three_quarters=three_quarters,
        decades=math.log10(max(1.0, three_quarters) / max(1.0, quarter)),
        distance=math.log10(max(1.0, half) / max(1, memorised)),
    )


def _passed(curve: Curve, level: float, logs: int) -> float | None:
    held = curves.first_stay(curve, level, logs)
    if held is None:
        return None
    row = int(np.searchsorted(curve.steps, held.by))
    if not row:
        return float(held.by)
    before, after = curve.values[row - 1 : row + 1]
    return held.after + (level - float(before)) / float(after - before) * (held.by - held.after)


def lost(test: Curve, way: Way, early: float, late: int, *, share: float, size: int) -> bool:
    """Return whether the test accuracy fell by ``share`` of the way from a height reached by step ``early``.

    The fall, to the lowest value until step ``late``, must exceed the noise of counting ``size`` samples.
    """
    inside = test.between(-1, late)
    if not len(inside):
        return False
    medians = curves.running_median(inside, HEIGHT_LOGS)
    first = medians[inside.steps[: len(medians)] < early]
    if not len(first):
        return False
    peak = int(np.argmax(first))
    fall = float(first[peak] - medians[peak:].min())
    return fall >= max(share * (way(1.0) - way(0.0)), NOISE_SD * math.sqrt(0.5 / max(1, size)))


def refitted(
    train: Curve, test: Curve, way: Way, after: int, late: int, *, fitted: float, broken: float
) -> bool:
    """Return whether the test accuracy rose by half of its way while training data were fitted again.

    Each time is from the last log before the training accuracy fell below ``broken`` to twice the time until
    it reached ``fitted``.
    """
    inside = train.between(after, late + 1)
    rose, free = 0.0, after
    for start in np.flatnonzero(inside.values < broken).tolist():
        begin = int(inside.steps[max(0, start - 1)])
        if begin < free:
            continue
        again = np.flatnonzero(inside.values[start:] >= fitted)
        free = int(inside.steps[start + int(again[0])]) if len(again) else late
        free += free - begin
        before = test.between(after, begin + 1).values
        then = test.between(begin, free + 1).values
        if len(before) and len(then):
            rose += max(0.0, float(then.max()) - float(before[-1]))
    return rose >= 0.5 * (way(1.0) - way(0.0))
