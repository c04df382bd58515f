"""Correlation of measures with the test accuracy, at their lead or lag, compared with the matched control.

A curve that falls for long correlates with any curve that rises for long. Only against a matched control, in
which nothing can generalise, can a measure be called a signal of grokking (docs/formulas.md, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.grokking.model.reader import TEST
from backlight.monitors.grokking.model.verdicts import Detection, LeadLagLimits
from backlight.store.read.run import Run, Scalar

MIN_LOGS = 12
"""Fewest common logs of a measure and the test accuracy."""

LEAD_ADVANTAGE = 0.005
"""Correlation by which a lead or lag must exceed that of no shift to be reported."""

MODEL_MEASURES = ("gram/model/", "gradient/", "window/", "agop/", "update/")
"""Prefixes of the measures of a whole model; those of single layers are too many to compare."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LeadLag:
    """Correlation of one measure with the test accuracy after memorisation; None is not measured.

    ``correlation`` is Spearman's at ``lead_logs``, the shift at which the values themselves correlate most
    (by Pearson: the ranks of two curves that saturate agree at many shifts), positive where the measure
    leads, and ``lead_steps`` the median of that shift in steps. ``control`` is that of the control's measure
    with this run's test accuracy at the same lead. ``levels`` are medians of the measure in the last tenth of
    the run and of its control; ``levels_differ`` whether the middle 80 % of the two are disjoint there.
    """

    measure: str
    logs: int
    conclusion: str
    correlation: float | None = None
    lead_logs: int = 0
    lead_steps: int = 0
    control: float | None = None
    levels: tuple[float | None, float | None] = (None, None)
    levels_differ: bool | None = None


def measures_of(run: Run) -> dict[str, Scalar]:
    """Return the measures of the whole model by name: geometry, and progress measures."""
    names = [n for n in run.scalar_names("backlight") if n.startswith(MODEL_MEASURES)]
    found = {name: run.scalar(name) for name in sorted(names)}
    progress = sorted(n for n in run.scalar_names("user") if n.startswith("progress/"))
    return found | {name: run.scalar(name, source="user") for name in progress}


def lead_lags(
    run: Run, detection: Detection, control: Run | None = None, limits: LeadLagLimits | None = None
) -> tuple[LeadLag, ...]:
    """Return every measure of ``run`` with its correlation, the strongest first.

    Logs before memorisation are left out, since everything moves then. Without ``control``, the matched run
    with random labels, no conclusion is drawn.
    """
    limits = limits or LeadLagLimits()
    test = run.scalar(TEST, source="user")
    start = detection.memorised.by if detection.memorised else -1
    of_control: Mapping[str, Scalar] = measures_of(control) if control is not None else {}
    rows = [
        _correlated(name, scalar, test, start, of_control.get(name), limits, control is not None)
        for name, scalar in measures_of(run).items()
    ]
    return tuple(sorted(rows, key=lambda row: (-abs(row.correlation or 0.0), row.measure)))


def _correlated(
    name: str,
    measure: Scalar,
    test: Scalar,
    start: int,
    of_control: Scalar | None,
    limits: LeadLagLimits,
    has_control: bool,
) -> LeadLag:
    steps, values, accuracy = _common(measure, test, start)
    if len(steps) < MIN_LOGS:
        return LeadLag(name, len(steps), "too few common logs")
    lead = _lead(values, accuracy, int(limits.lag_share * len(steps)))
    rho = rank_correlation(*_shifted(values, accuracy, lead))
    if rho is None:
        return LeadLag(name, len(steps), "does not move")
    shifts = steps[lead:] - steps[: len(steps) - lead] if lead >= 0 else steps[:lead] - steps[-lead:]
    control_rho, differ = None, None
    levels: tuple[float | None, float | None] = (float(np.median(_tail(values))), None)
    if of_control is not None:
        control_steps, control_values, control_accuracy = _common(of_control, test, start)
        if len(control_steps) >= MIN_LOGS:
            # With the accuracy of this run: that of the control is noise.
            control_rho = rank_correlation(*_shifted(control_values, control_accuracy, lead))
            levels = (levels[0], float(np.median(_tail(control_values))))
            differ = _levels_differ(values, control_values)
    return LeadLag(
        measure=name,
        logs=len(steps),
        conclusion=_conclusion(rho, control_rho, differ, has_control, limits),
        correlation=rho,
        lead_logs=lead,
        lead_steps=int(np.median(shifts)) if lead else 0,
        control=control_rho,
        levels=levels,
        levels_differ=differ,
    )


def _conclusion(
    rho: float, control_rho: float | None, differ: bool | None, has_control: bool, limits: LeadLagLimits
) -> str:
    if abs(rho) < limits.correlation:
        return "does not follow the test accuracy"
    if not has_control:
        return "no conclusion: there is no matched control"
    if differ is None:
        return "no conclusion: the control did not measure it"
    similar = (
        control_rho is not None
        and control_rho * rho > 0
        and abs(control_rho) > abs(rho) - limits.correlation_margin
    )
    if not differ:
        return "the control shows the same" if similar else "the control ends at the same level"
    if similar:
        return "the control follows as well, and ends at another level"
    return "follows, and the control does not"


def _common(measure: Scalar, test: Scalar, start: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    steps, rows, test_rows = np.intersect1d(measure.steps, test.steps, return_indices=True)
    values, accuracy = measure.values[rows], test.values[test_rows]
    kept = np.isfinite(values) & np.isfinite(accuracy) & (steps >= start)
    return steps[kept], values[kept], accuracy[kept]


def _lead(values: Floats, accuracy: Floats, most: int) -> int:
    """Return the shift of at most ``most`` logs at which the two correlate best; 0 unless it is better."""
    by_lead = {lead: _pearson(*_shifted(values, accuracy, lead)) for lead in range(-most, most + 1)}
    best = max(by_lead, key=lambda lead: (abs(by_lead[lead]), -abs(lead)))
    # At the edge of the tried shifts there may be a better one beyond: that is no lead.
    return best if abs(best) < most and abs(by_lead[best]) >= abs(by_lead[0]) + LEAD_ADVANTAGE else 0


def _shifted(values: Floats, accuracy: Floats, lead: int) -> tuple[Floats, Floats]:
    """Return the measure and the accuracy ``lead`` logs later."""
    if lead > 0:
        return values[:-lead], accuracy[lead:]
    return (values[-lead:], accuracy[:lead]) if lead < 0 else (values, accuracy)


def _pearson(first: Floats, second: Floats) -> float:
    """Return Pearson's correlation, 0 if one does not vary."""
    # Without the warnings of numpy.corrcoef where one does not vary.
    one, other = first - first.mean(), second - second.mean()
    size = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / size if size > 0 else 0.0


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None if one does not vary."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    from scipy import stats  # noqa: PLC0415 - a second of import that few reports need

    return float(stats.spearmanr(first, second).statistic)


def _tail(values: Floats) -> Floats:
    return values[-max(5, len(values) // 10) :]


def _levels_differ(values: Floats, control_values: Floats) -> bool:
    low, high = np.quantile(_tail(values), (0.1, 0.9))
    control_low, control_high = np.quantile(_tail(control_values), (0.1, 0.9))
    return bool(low > control_high or control_low > high)
