"""Which measures follow the test accuracy, with what lead or lag, and whether the control's do as well.

A curve that falls for long correlates with any curve that rises for long. That a measure *signals*
grokking can only be said against a matched control, in which nothing can generalise. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.grokking.model.reader import TEST
from backlight.monitors.grokking.model.thresholds import Thresholds
from backlight.monitors.grokking.model.verdicts import Detection
from backlight.store.read.run import Run, Scalar

LEAST = 12
"""Fewest common logs of a measure and the test accuracy."""

PREFER_NONE = 0.005
"""A lead or lag must be better than none by this much to be reported."""

MEASURES = ("gram/model/", "gradient/", "window/", "agop/", "update/")
"""Beginnings of the measures of a whole model; those of single layers are too many to compare."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Following:
    """How one measure goes with the test accuracy after memorisation.

    ``lead_logs`` is the shift at which the values themselves correlate most (Pearson: the ranks of two
    curves that saturate agree at many shifts), positive where the measure comes first, and ``lead_steps``
    the median of that in steps. ``correlation`` is Spearman's at this lead, ``without_lead`` the one at
    none, ``control`` that of the control's measure with this run's test accuracy at the same lead.
    ``levels`` are the medians of the measure in the last tenth of the run and of its control, ``apart``
    tells whether the middle 80 % of the two do not touch there. None is not measured. ``says`` is the
    conclusion in words.
    """

    measure: str
    logs: int
    correlation: float | None
    lead_logs: int
    lead_steps: int
    without_lead: float | None
    control: float | None
    levels: tuple[float | None, float | None]
    apart: bool | None
    says: str


def measures_of(run: Run) -> dict[str, Scalar]:
    """Return the measures of the whole model by name: geometry, and progress measures."""
    names = [n for n in run.scalar_names("backlight") if n.startswith(MEASURES)]
    found = {name: run.scalar(name) for name in sorted(names)}
    progress = sorted(n for n in run.scalar_names("user") if n.startswith("progress/"))
    return found | {name: run.scalar(name, source="user") for name in progress}


def follow(
    run: Run, detection: Detection, control: Run | None = None, limits: Thresholds | None = None
) -> tuple[Following, ...]:
    """Return every measure of ``run`` with its correlation, the strongest first.

    Parameters
    ----------
    run, detection:
        A run and its verdict; what came before memorisation is left out, since everything moves then.
    control:
        The matched run with random labels; without it no conclusion is drawn.
    limits:
        Thresholds; None takes the defaults.
    """
    limits = limits or Thresholds()
    test = run.scalar(TEST, source="user")
    start = detection.memorised.by if detection.memorised else -1
    theirs: Mapping[str, Scalar] = measures_of(control) if control is not None else {}
    rows = [
        _one(name, scalar, test, start, theirs.get(name), limits, control is not None)
        for name, scalar in measures_of(run).items()
    ]
    return tuple(sorted(rows, key=lambda row: (-abs(row.correlation or 0.0), row.measure)))


def _one(
    name: str,
    mine: Scalar,
    test: Scalar,
    start: int,
    theirs: Scalar | None,
    limits: Thresholds,
    has_control: bool,
) -> Following:
    steps, values, accuracy = _common(mine, test, start)
    if len(steps) < LEAST:
        return Following(name, len(steps), None, 0, 0, None, None, (None, None), None, "too few common logs")
    most = int(limits.lag_share * len(steps))
    plain = _shifted(values, accuracy, 0)
    best = _lead(values, accuracy, most)
    rho = _shifted(values, accuracy, best)
    if rho is None:
        return Following(name, len(steps), None, 0, 0, None, None, (None, None), None, "does not move")
    away = steps[best:] - steps[: len(steps) - best] if best >= 0 else steps[:best] - steps[-best:]
    other: float | None = None
    levels: tuple[float | None, float | None] = (_end(values), None)
    apart: bool | None = None
    if theirs is not None:
        at, their_values, their_accuracy = _common(theirs, test, start)
        if len(at) >= LEAST:
            other = _shifted(their_values, their_accuracy, best)
            levels, apart = (_end(values), _end(their_values)), _apart(values, their_values)
    says = _conclusion(rho, other, apart, theirs is not None, has_control, limits)
    lead_steps = int(np.median(away)) if best else 0
    return Following(name, len(steps), rho, best, lead_steps, plain, other, levels, apart, says)


def _conclusion(
    rho: float,
    other: float | None,
    apart: bool | None,
    measured: bool,
    has_control: bool,
    limits: Thresholds,
) -> str:
    if abs(rho) < limits.correlation:
        return "does not follow the test accuracy"
    if not has_control:
        return "no claim: there is no matched control"
    if not measured or apart is None:
        return "no claim: the control did not measure it"
    alike = other is not None and other * rho > 0 and abs(other) > abs(rho) - limits.correlation_margin
    if not apart:
        return "the control shows the same" if alike else "the control ends at the same level"
    if alike:
        return "the control moves alike, and ends at another level"
    return "follows, and the control does not"


def _common(measure: Scalar, test: Scalar, start: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    steps, mine, theirs = np.intersect1d(measure.steps, test.steps, return_indices=True)
    values, accuracy = measure.values[mine], test.values[theirs]
    kept = np.isfinite(values) & np.isfinite(accuracy) & (steps >= start)
    return steps[kept], values[kept], accuracy[kept]


def _shifted(values: Floats, accuracy: Floats, lead: int) -> float | None:
    """Return Spearman's correlation of a measure with the accuracy ``lead`` logs later."""
    return rank_correlation(*_cut(values, accuracy, lead))


def _lead(values: Floats, accuracy: Floats, most: int) -> int:
    """Return the shift of at most ``most`` logs at which the two correlate best; 0 unless it is better."""
    by_lead = {lead: _linear(*_cut(values, accuracy, lead)) for lead in range(-most, most + 1)}
    best = max(by_lead, key=lambda lead: (abs(by_lead[lead]), -abs(lead)))
    # At the edge of what was tried there may be a better one beyond: that is no lead.
    return best if abs(best) < most and abs(by_lead[best]) >= abs(by_lead[0]) + PREFER_NONE else 0


def _cut(values: Floats, accuracy: Floats, lead: int) -> tuple[Floats, Floats]:
    if lead > 0:
        return values[:-lead], accuracy[lead:]
    return (values[-lead:], accuracy[:lead]) if lead < 0 else (values, accuracy)


def _linear(first: Floats, second: Floats) -> float:
    """Return Pearson's correlation, 0 where one does not vary."""
    one, other = first - first.mean(), second - second.mean()
    size = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / size if size > 0 else 0.0


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None where one does not vary."""
    if len(first) < 3:
        return None
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return _linear(_ranks(first), _ranks(second))


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _tail(values: Floats) -> Floats:
    return values[-max(5, len(values) // 10) :]


def _end(values: Floats) -> float:
    return float(np.median(_tail(values)))


def _apart(mine: Floats, theirs: Floats) -> bool:
    """Tell whether the middle 80 % of the two at their ends do not touch."""
    low, high = np.quantile(_tail(mine), (0.1, 0.9))
    their_low, their_high = np.quantile(_tail(theirs), (0.1, 0.9))
    return bool(low > their_high or their_low > high)
