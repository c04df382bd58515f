"""Correlation of measures with the test accuracy, at their lead or lag, compared with matched controls.

A curve that falls for long correlates with any curve that rises for long. Only against controls, in which
nothing can generalise, can a measure be called a signal of grokking, and only against enough of them: two
controls differ as well (docs/formulas.md, section 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.grokking.model.reader import TEST
from backlight.monitors.grokking.model.verdicts import Detection, LeadLagLimits
from backlight.store.read.run import Run, Scalar

# Whether a measure follows the test accuracy more than it does in controls: permutation of run and control.
#
# Had the labels no influence on a measure, its curves in runs and in controls would be exchangeable. The
# statistic is computed for every way to choose as many curves as there are runs among all of them, so that
# control against control gives a p-value of at most p in a share p of comparisons (docs/formulas.md, 4).

Floats = NDArray[np.float64]

MAX_SPLITS = 20_000
"""Splits that are enumerated; of more, so many are drawn."""

TIE = 1e-9
"""Relative difference below which two statistics are equal."""


def smallest_p(runs: int, controls: int) -> float:
    """Return the smallest p-value that so many runs and controls can give; 1 without either."""
    if not runs or not controls:
        return 1.0
    # Of equally many, a split and its complement have the same statistic.
    return (1 + (runs == controls)) / math.comb(runs + controls, runs)


def needed_of_each(measures: int, rate: float) -> int:
    """Return how many runs, and as many controls, can find one of ``measures`` at a false-discovery rate."""
    return next(n for n in itertools.count(2) if smallest_p(n, n) <= rate / max(1, measures))


def slopes(curves_RL: Floats, reference_L: Floats, most: int) -> Floats:
    """Return the change of each curve per unit of the reference, ``[R, 2 most + 1]``, at leads -most to most.

    At a positive lead the reference is taken so many logs later. Slopes and not correlations: a control whose
    curve moves a hundredth as far correlates just as well.
    """
    shares, length = [], len(reference_L)
    for lead in range(-most, most + 1):
        values = curves_RL[:, : length - lead] if lead >= 0 else curves_RL[:, -lead:]
        later = reference_L[lead:] if lead >= 0 else reference_L[:lead]
        away = later - later.mean()
        square = float(away @ away)
        shares.append(values @ away / square if square > 0 else np.zeros(len(curves_RL)))
    return np.stack(shares, axis=1)


def permutation_p(slopes_RK: Floats, runs: int) -> float:
    """Return the p-value that the first ``runs`` of the curves have other slopes than the rest.

    The statistic is the largest, over the K leads, of the difference of the two means over the standard
    deviation of all R slopes: the search over leads is part of what is permuted.
    """
    count = len(slopes_RK)
    spread = slopes_RK.std(axis=0)
    scaled = (slopes_RK - slopes_RK.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    if not scaled.size or not 0 < runs < count:
        return 1.0
    # The scaled slopes sum to 0: the difference of means is proportional to the sum over the runs.
    statistic = np.abs(_splits(count, runs) @ scaled).max(axis=1)
    return float((statistic >= statistic[0] * (1 - TIE)).mean())


def _splits(count: int, runs: int) -> Floats:
    """Return rows of 0 and 1, ``[S, count]``, with ``runs`` ones each; the first row is the true split."""
    if math.comb(count, runs) <= MAX_SPLITS:
        chosen = np.array(list(itertools.combinations(range(count), runs)))
    else:
        draw = np.random.default_rng(0)
        drawn = np.argsort(draw.random((MAX_SPLITS - 1, count)), axis=1)[:, :runs]
        chosen = np.concatenate([np.arange(runs)[None], drawn])
    rows = np.zeros((len(chosen), count))
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    return rows


MIN_LOGS = 12
"""Fewest common logs of a measure and the test accuracy."""

FOLLOWS = "follows, and the controls do not"
"""Conclusion on a measure that signals generalisation."""

LEAD_ADVANTAGE = 0.005
"""Correlation by which a lead or lag must exceed that of no shift to be reported."""

MODEL_MEASURES = ("gram/model/", "gradient/", "window/", "agop/", "update/")
"""Prefixes of the measures of a whole model; those of single layers are too many to compare."""


@dataclass(frozen=True)
class LeadLag:
    """Correlation of one measure with the test accuracy after memorisation; None is not measured.

    ``correlation`` is Spearman's at ``lead_logs``, the shift at which the values themselves correlate most
    (by Pearson: the ranks of two curves that saturate agree at many shifts), positive where the measure
    leads, and ``lead_steps`` the median of that shift in steps.
    ``control`` is the slope of the controls' measure over the test accuracy of the runs at that lead, as a
    share of that of the runs: 1 where it moves as far.
    ``levels`` are medians of the measure in the last tenth of the run, and of its controls. ``runs`` counts
    the runs, this one and its seeds, and the controls of which ``p`` is the permutation p-value; ``q`` is
    the false-discovery rate at which it is found.
    """

    measure: str
    logs: int
    conclusion: str
    correlation: float | None = None
    lead_logs: int = 0
    lead_steps: int = 0
    control: float | None = None
    levels: tuple[float | None, float | None] = (None, None)
    runs: tuple[int, int] = (1, 0)
    p: float | None = None
    q: float | None = None


def measures_of(run: Run) -> dict[str, Scalar]:
    """Return the measures of the whole model by name: geometry, and progress measures."""
    names = [
        n
        for n in run.scalar_names("backlight")
        if n.startswith(MODEL_MEASURES) and not n.endswith(("_low", "_high"))
    ]
    geometry = {name: run.scalar(name) for name in sorted(names)}
    progress = sorted(n for n in run.scalar_names("user") if n.startswith("progress/"))
    return geometry | {name: run.scalar(name, source="user") for name in progress}


def lead_lags(
    run: Run,
    detection: Detection,
    controls: Sequence[Run] = (),
    seeds: Sequence[Run] = (),
    limits: LeadLagLimits | None = None,
) -> tuple[LeadLag, ...]:
    """Return every measure of ``run`` with its correlation, the strongest first.

    Logs before memorisation are left out, since everything moves then. ``controls`` are runs with random
    labels and ``seeds`` other seeds of ``run``; too few of them allow no conclusion.
    """
    limits = limits or LeadLagLimits()
    test = run.scalar(TEST, source="user")
    start = detection.memorised.by if detection.memorised else -1
    accuracies = [test, *(other.scalar(TEST, source="user") for other in seeds)]
    of_seeds, of_controls = ([measures_of(other) for other in group] for group in (seeds, controls))
    rows = [
        _correlated(
            name,
            _common(scalar, test, start),
            accuracies,
            [scalars[name] for scalars in of_seeds if name in scalars],
            [scalars[name] for scalars in of_controls if name in scalars],
            limits,
        )
        for name, scalar in measures_of(run).items()
    ]
    concluded = _concluded(rows, limits)
    return tuple(sorted(concluded, key=lambda row: (-abs(row.correlation or 0.0), row.measure)))


def _correlated(
    name: str,
    common: tuple[NDArray[np.int64], Floats, Floats],
    accuracies: Sequence[Scalar],
    seeds: Sequence[Scalar],
    controls: Sequence[Scalar],
    limits: LeadLagLimits,
) -> LeadLag:
    """Return one measure, without its conclusion if it follows the test accuracy."""
    steps, values, accuracy = common
    if len(steps) < MIN_LOGS:
        return LeadLag(name, len(steps), "too few common logs")
    most = int(limits.lag_share * len(steps))
    lead = _lead(values, accuracy, most)
    rho = rank_correlation(*_shifted(values, accuracy, lead))
    if rho is None:
        return LeadLag(name, len(steps), "does not move")
    shifts = steps[lead:] - steps[: len(steps) - lead] if lead >= 0 else steps[:lead] - steps[-lead:]
    theirs = _at(controls, steps)
    curves = np.stack([values, *_at(seeds, steps), *theirs])
    runs = len(curves) - len(theirs)
    # What only ever rises: wiggles of a run's own accuracy are those of its own measures as well.
    reference = np.maximum.accumulate(np.mean([accuracy, *_at(accuracies[1:], steps)], axis=0))
    level, share, p = None, None, None
    if theirs:
        changes = slopes(curves, reference, most)
        p = permutation_p(changes, runs)
        of_runs, of_controls = changes[:runs, most + lead].mean(), changes[runs:, most + lead].mean()
        share = float(of_controls / of_runs) if of_runs else None
        level = float(np.median([np.median(_tail(curve)) for curve in theirs]))
    return LeadLag(
        measure=name,
        logs=len(steps),
        conclusion="" if abs(rho) >= limits.correlation else "does not follow the test accuracy",
        correlation=rho,
        lead_logs=lead,
        lead_steps=int(np.median(shifts)) if lead else 0,
        control=share,
        levels=(float(np.median(_tail(values))), level),
        runs=(runs, len(theirs)),
        p=p,
    )


def _concluded(rows: Sequence[LeadLag], limits: LeadLagLimits) -> Iterator[LeadLag]:
    """Yield the rows with their conclusions, at one false-discovery rate over all measures."""
    tested = [row for row in rows if row.p is not None]
    adjusted = dict(
        zip((row.measure for row in tested), false_discoveries([row.p or 0.0 for row in tested]), strict=True)
    )
    for row in rows:
        q = adjusted.get(row.measure)
        conclusion = row.conclusion
        if not conclusion and q is None:
            conclusion = "no conclusion: no control measured it"
        elif not conclusion and smallest_p(*row.runs) > limits.false_discovery_rate:
            conclusion = "no conclusion: too few runs and controls"
        elif not conclusion:
            conclusion = "not distinguished from the controls"
            if q is not None and q <= limits.false_discovery_rate:
                small = row.control is not None and row.control <= limits.control_share
                conclusion = FOLLOWS if small else "the controls follow as well"
        yield replace(row, conclusion=conclusion, q=q)


def false_discoveries(p_values: Sequence[float]) -> list[float]:
    """Return the false-discovery rate at which each p-value is found (Benjamini and Hochberg, 1995)."""
    if not p_values:
        return []
    p_N = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p_N)[::-1]
    rates = p_N[order] * len(p_N) / np.arange(len(p_N), 0, -1)
    rates[order] = np.minimum(1.0, np.minimum.accumulate(rates))
    return [float(q) for q in rates]


def _at(others: Sequence[Scalar], steps: NDArray[np.int64]) -> list[Floats]:
    """Return the values of other runs at ``steps``, interpolated; without those that do not cover them."""
    curves = []
    for other in others:
        finite = np.isfinite(other.values)
        if finite.sum() >= MIN_LOGS and other.steps[finite][-1] >= steps[-1]:
            curves.append(np.interp(steps, other.steps[finite], other.values[finite]))
    return curves


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
    centred, other = first - first.mean(), second - second.mean()
    size = math.sqrt(float(centred @ centred) * float(other @ other))
    return float(centred @ other) / size if size > 0 else 0.0


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None if one does not vary."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return _pearson(_ranks(first), _ranks(second))


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse], dtype=np.float64)


def _tail(values: Floats) -> Floats:
    return values[-max(5, len(values) // 10) :]
