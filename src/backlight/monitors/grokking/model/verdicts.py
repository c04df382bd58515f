"""Verdicts on grokking with their conditions and limits, as frozen records (docs/formulas.md, section 4).

Accuracies are shares of samples. A share of the way is (accuracy - chance) / (plateau - chance). Counts are
in logs, that is in steps at which an accuracy was logged.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.findings.limits import Limits, limit
from backlight.monitors.grokking.model import curves
from backlight.monitors.grokking.model.curves import Curve, StepInterval

_FORMULAS = "docs/formulas.md, section 4, grokking"
_CHOSEN = "chosen: the fast oracle is found, its nulls are not, see bench/grokking_nulls.py"


def _share(default: float, reason: str, source: str = _FORMULAS) -> Any:
    return limit(default, reason, source=source, low=0.0, high=1.0)


def _count(default: int, reason: str, source: str = _FORMULAS) -> Any:
    return limit(default, reason, source=source, low=1)


@dataclass(frozen=True)
class VerdictLimits(Limits, monitor="grokking"):
    """Limits of the verdict on grokking."""

    # The two times.
    train_accuracy: float = _share(0.99, "training accuracy from which a run has memorised")
    test_share: float = _share(
        0.95, "share of the way from chance to the plateau from which a run generalises"
    )
    stay_logs: int = _count(5, "logs in a row that an accuracy must hold, so that a spike is no time")

    # What makes a delay grokking.
    delay_ratio: float = limit(
        2.0, "t_generalise / t_memorise from which the delay is grokking", source=_FORMULAS, low=1.0
    )
    delay_steps: int = _count(
        100,
        "steps between the two times: fewer are within the memory of the optimizer, which for Adam's second "
        "moment is 50 (beta 0.98) to 1000 steps (0.999)",
        _CHOSEN,
    )
    delay_ratio_strong: float = limit(
        5.0, "t_generalise / t_memorise from which grokking is called strong", source=_FORMULAS, low=1.0
    )
    logs_between: int = _count(10, "logs between the two times: fewer do not show what happened")
    transition_decades: float = limit(
        0.4,
        "decades of steps from a quarter to three quarters of the rise up to which it is sharp, above which "
        "it is gradual; no condition of grokking. A line from 0 takes 0.48, an exponential approach 0.68",
        source=_CHOSEN,
        low=0.0,
    )
    test_share_memorised: float = _share(
        0.5, "share of the way that the test accuracy may have gone when the run memorised"
    )
    train_stays: float = _share(0.97, "training accuracy that must last between the two times")
    train_stays_share: float = _share(0.95, "share of the logs between at which it must")

    # What makes it a recovery instead.
    lost: float = _share(
        0.15,
        "share of the way that the test accuracy had reached without a delay and lost again: a recovery, or "
        "double descent",
        _CHOSEN,
    )
    refit: float = _share(
        0.9,
        "a training accuracy below it is that of other training data: a test accuracy that rises half of the "
        "way while they are fitted is that of a curriculum",
        _CHOSEN,
    )

    # The sweep: the verdict must not hang on where the lines are drawn.
    sweep_train_low: float = _share(0.9, "lowest training accuracy of the sweep; train_accuracy to it")
    sweep_test_low: float = _share(0.9, "lowest share of the way of the sweep; test_share to it")

    # What the data must be able to carry.
    plateau_minimum: float = _share(
        0.5, "a plateau below it (chance taken off) is not called generalisation", _CHOSEN
    )
    wilson_share: float = _share(
        0.8, "share of the way that the Wilson lower bound (95 %) of the plateau must reach", _CHOSEN
    )
    zero_logs: int = _count(
        5, "accuracies of exactly 0 in a row that look like a log filled where nothing was measured", _CHOSEN
    )
    zero_probability: float = _share(
        0.001, "chance of no hit at all in the test set below which an exact 0 is doubted", _CHOSEN
    )
    rising: float = _share(
        0.05,
        "rise of the test accuracy over the last fifth of the steps from which the end cut it off",
        _CHOSEN,
    )


@dataclass(frozen=True)
class LeadLagLimits(Limits, monitor="grokking"):
    """Limits of the comparison of measures with their controls."""

    correlation: float = _share(
        0.7, "rank correlation with the test accuracy from which a measure is said to follow it", _CHOSEN
    )
    control_share: float = _share(
        0.5,
        "change of the controls with the test accuracy, as a share of that of the runs, up to which they are "
        "said not to follow",
        _CHOSEN,
    )
    false_discovery_rate: float = _share(
        0.05,
        "expected share, among measures that are said to follow while the controls do not, of those that do "
        "not differ from the controls",
        "Benjamini and Hochberg (1995); bench/grokking_placebo.py",
    )
    lag_share: float = _share(0.25, "longest lead or lag tried, as a share of the logs", _CHOSEN)


class GrokkingVerdict(enum.StrEnum):
    """The verdicts on the accuracies of a run."""

    GROKKING = "grokking"
    NO_DELAY = "no-delay"
    MEMORISED = "memorised"
    NOT_FITTED = "not-fitted"
    UNSTABLE = "unstable"
    THRESHOLD_ARTEFACT = "threshold-artefact"
    INSUFFICIENT_DATA = "insufficient-data"
    CENSORED = "censored"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the verdict; ``held`` is None if the data do not decide it."""

    name: str
    expected: str
    got: str
    held: bool | None


class Sharpness(enum.StrEnum):
    """How the width of a rise compares with ``transition_decades``, by the whole of its interval."""

    SHARP = "sharp"
    INTERMEDIATE = "intermediate"
    GRADUAL = "gradual"


@dataclass(frozen=True, slots=True)
class Transition:
    """The rise of the test accuracy from where it was at memorisation to its plateau.

    Steps at which it passed a quarter, half and three quarters of the rise, interpolated between logs.

    ``decades`` is log10 of the last step over the first, ``distance`` log10 of the middle one over the time
    to memorise. ``interval`` bounds ``decades`` by the logs around each step and by the counting noise of the
    test set (95 % at each step); its upper bound is None where three quarters plus that noise were not held.
    """

    quarter: float
    half: float
    three_quarters: float
    decades: float
    distance: float
    interval: tuple[float, float | None]
    sharpness: Sharpness

    @property
    def words(self) -> str:
        """The sharpness with its interval: ``sharp: ... 0.2 (0.17 to 0.24) decades of steps``."""
        low, high = self.interval
        bounds = f"at least {low:.2g}" if high is None else f"{low:.2g} to {high:.2g}"
        return (
            f"{self.sharpness.value}: its middle half takes {self.decades:.2g} ({bounds}) decades of steps, "
            f"where a straight line takes {_LINE:.2g} and an exponential approach {_EXPONENTIAL:.2g}"
        )


_LINE = math.log10(3)
"""Decades from a quarter to three quarters of a straight line from step 0."""

_EXPONENTIAL = math.log10(math.log(4) / math.log(4 / 3))
"""The same of an exponential approach."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One point of the sweep: its two thresholds, its times, and whether it would be called grokking."""

    train_accuracy: float
    test_share: float
    memorised: StepInterval | None
    generalised: StepInterval | None
    grokking: bool


@dataclass(frozen=True)
class Detection:
    """A verdict and its evidence.

    ``memorised`` and ``generalised`` are intervals (previous log, this log], None if the run never did.
    ``ratio`` bounds t_generalise / t_memorise by the two intervals; its upper bound may be None.
    ``transition`` is the rise between the two, None where one of them is missing.
    ``test_accuracy`` is the one that defines t_generalise, ``memorised_test`` the test accuracy when the run
    memorised. ``test_size_known`` is False where ``test_size`` is a lower bound from the values.
    """

    verdict: GrokkingVerdict
    claim: str
    memorised: StepInterval | None
    generalised: StepInterval | None
    plateau: float | None
    test_accuracy: float | None
    chance: float | None
    test_size: int
    test_size_known: bool
    wilson: tuple[float, float] | None
    logs: tuple[int, int]
    last_step: int
    strong: bool = False

    @property
    def words(self) -> str:
        """The verdict in words: ``grokking, strong`` or ``no-delay``."""
        return "grokking, strong" if self.strong else self.verdict.value

    ratio: tuple[float, float | None] | None = None
    transition: Transition | None = None
    memorised_test: float | None = None
    conditions: tuple[Condition, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    notes: tuple[str, ...] = ()


# The rise of the test accuracy: how sharp and how late it is, and signs that it is a recovery.
#
# ``way`` maps a share of the way from chance to plateau to the accuracy there.

Way = Callable[[float], float]

HEIGHT_LOGS = 3
"""Logs of the medians that show a height, which before memorisation may last no longer."""

NOISE_SD = 3.0
"""Standard deviations by which a fall must exceed the counting noise of two accuracies."""


def transition_of(
    test: Curve, start: float, plateau: float, memorised: int, logs: int, *, size: int, sharp: float
) -> Transition | None:
    """Return the rise of ``test`` from ``start`` to ``plateau``; None if it did not hold three quarters.

    ``start`` is the accuracy when the run memorised, at step ``memorised``. Each step is where the accuracy
    reached its level for the first time and held it for ``logs`` logs, interpolated between the two logs.
    What was reached before a fall counts: a rise in two parts is wide. ``size`` samples were tested;
    ``sharp`` is the width in decades that divides sharp from gradual.
    """
    levels = [start + share * (plateau - start) for share in (0.25, 0.5, 0.75)]
    quarter, half, three_quarters = (_passed(test, level, logs) for level in levels)
    if quarter is None or half is None or three_quarters is None:
        return None
    first, last = (_passed_within(test, level, logs, max(1, size)) for level in (levels[0], levels[2]))
    low = 0.0 if first[1] is None else max(0.0, _decades(first[1], last[0]))
    high = None if last[1] is None else _decades(first[0], last[1])
    sharpness = Sharpness.INTERMEDIATE
    if low > sharp:
        sharpness = Sharpness.GRADUAL
    elif high is not None and high <= sharp:
        sharpness = Sharpness.SHARP
    return Transition(
        quarter=quarter,
        half=half,
        three_quarters=three_quarters,
        decades=_decades(quarter, three_quarters),
        distance=_decades(memorised, half),
        interval=(low, high),
        sharpness=sharpness,
    )


def _decades(first: float, last: float) -> float:
    return math.log10(max(1.0, last) / max(1.0, first))


def _passed(curve: Curve, level: float, logs: int) -> float | None:
    times = curves.first_stay(curve, level, logs)
    if times is None:
        return None
    row = int(np.searchsorted(curve.steps, times.by))
    if not row:
        return float(times.by)
    before, after = curve.values[row - 1 : row + 1]
    return times.after + (level - float(before)) / float(after - before) * (times.by - times.after)


def _passed_within(curve: Curve, level: float, logs: int, size: int) -> tuple[float, float | None]:
    """Return the first and last step at which the accuracy may have passed ``level``, given its noise."""
    noise = curves.WILSON_Z * math.sqrt(max(0.0, level * (1 - level)) / size)
    early = curves.first_stay(curve, level - noise, logs)
    late = curves.first_stay(curve, level + noise, logs)
    return float(early.after) if early else 0.0, float(late.by) if late else None


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
