"""Rule ``outlier_steps``: single steps far above the median, by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings.limits import limit
from backlight.findings.recorded_steps import optimizer_sets, step_weights, work_of
from backlight.monitors.steptime.model.evidence import (
    GARBAGE_COLLECTION,
    BusyLimits,
    is_busy,
    percent,
    steady_phases,
)
from backlight.monitors.steptime.model.step_times import PREFIX, PhaseTimes
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, duration

_FIXES = {
    GARBAGE_COLLECTION: (
        "Call gc.freeze() after setup and gc.disable() with a gc.collect() every so many steps."
    ),
    "data": "Check the loader: shuffling, or an epoch that restarts its workers, if it has any.",
    "checkpoint": "This is saving inside the loop: save asynchronously, or less often.",
}


@dataclass(frozen=True)
class OutlierStepsLimits(BusyLimits):
    """Limits of the rule ``outlier_steps``."""

    outlier_factor: float = limit(2.0, "a step that takes this many times the median", low=1.0)
    outlier_deviations: float = limit(
        10.0,
        "robust standard deviations (1.4826 times the median absolute deviation) above the median",
        source="Hampel 1974 for median and MAD; the factor is chosen",
        low=1.0,
    )
    outlier_floor: float = limit(
        0.05, "seconds above the median below which a step is none: a busy machine pauses for tens of ms"
    )
    outlier_count: int = limit(3, "outliers of one cause: one or two are an accident", low=1)
    outlier_loss: float = limit(
        0.05, "share of the run's time that outliers cost beyond the median", high=1.0
    )


@rule("outlier_steps", monitor="steptime", version=2, limits=OutlierStepsLimits, is_statistic=True)
def outlier_steps(run: Run, limits: OutlierStepsLimits) -> Iterator[Finding]:
    """Find steps far above the median, by cause: a garbage collection, or the phase that grew most.

    A step is compared with those in which the same optimizers stepped: Muon takes longer than AdamW.

    One finding for each cause whose outliers cost a share of the run. A step with an evaluation, where the
    median step has none, is as long as intended, and its data may be that of the evaluation. A step with
    twice the forwards may take twice the time.
    """
    table = steady_phases(run, limits)
    if table is None or is_busy(run, limits):
        return
    for chosen in _alike(run, table, limits):
        yield from _outliers(run, chosen, limits)


def _alike(run: Run, table: PhaseTimes, limits: OutlierStepsLimits) -> Iterator[PhaseTimes]:
    """Yield the steps of each set of optimizers, of those that have enough of them."""
    sets = optimizer_sets(run, table.steps)
    for set_index in np.unique(sets):
        rows = np.flatnonzero(sets == set_index)
        if len(rows) >= limits.steady_steps:
            yield PhaseTimes(table.steps[rows], table.names, table.seconds[rows])


def _outliers(run: Run, table: PhaseTimes, limits: OutlierStepsLimits) -> Iterator[Finding]:
    total, weights = table.total, step_weights(table.steps)
    median = float(np.median(total))
    spread = 1.4826 * float(np.median(np.abs(total - median)))
    least = max(limits.outlier_deviations * spread, limits.outlier_floor)
    evaluated = np.zeros(len(total), np.bool_)
    if Phase.EVALUATION in table.names:
        seconds = table.phase(Phase.EVALUATION)
        evaluated = (seconds > 0) & (np.median(seconds) == 0)
    expected = median * np.fmax(1.0, work_of(run, table.steps))
    far = (total > limits.outlier_factor * expected) & (total - expected > least)
    rows = np.flatnonzero(far & ~evaluated)
    pauses: dict[int, float] = defaultdict(float)
    for event in run.events(GARBAGE_COLLECTION):
        if event.step is not None and event.attempt == run.attempts[-1].index:
            pauses[event.step] += float(event.payload.get("seconds") or 0.0)
    by_cause: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        by_cause[_cause(table, row, median, pauses)].append(row)
    for cause, members in sorted(by_cause.items(), key=lambda item: -float(total[item[1]].sum())):
        lost = float((weights * (total - median))[members].sum() / (weights * total).sum())
        if lost <= limits.outlier_loss or len(members) < limits.outlier_count:
            continue
        worst = members[int(np.argmax(total[members]))]
        step = int(table.steps[worst])
        evidence = [
            Evidence(f"scalars/{PREFIX}{name}", step, float(table.phase(name)[worst]), "s")
            for name in _grown(table, worst)
        ]
        is_collection = cause == GARBAGE_COLLECTION
        if is_collection:
            evidence.insert(0, Evidence(f"events/{GARBAGE_COLLECTION}", step, pauses[step], "s"))
        name = "Python's garbage collection" if is_collection else cause.replace("_", " ")
        longest = float(total[worst])
        yield Finding(
            severity=Severity.INFO,
            title=f"{count(len(members), 'step')} of {len(total)} are outliers, due to {name}",
            detail=(
                f"{count(len(members), 'step')} of {len(total)} take up to {longest / median:.1f} times the "
                f"median of {duration(median)} (step {step}: {duration(longest)}); the extra time is spent "
                f"in {name}. Expected gain: at most {percent(lost)} of the time."
            ),
            subject=Subject(step=step, phase=None if is_collection else cause),
            evidence=tuple(evidence),
            fix=_FIXES.get(
                cause,
                "Check what the script does at these steps, and which other processes used the machine.",
            ),
            refuted_if="a repeated run has outliers at other steps or none (the machine was busy).",
        )


def _cause(table: PhaseTimes, row: int, median: float, pauses: dict[int, float]) -> str:
    excess = float(table.total[row]) - median
    if pauses.get(int(table.steps[row]), 0.0) > excess / 2:
        return GARBAGE_COLLECTION
    return _grown(table, row)[0]


def _grown(table: PhaseTimes, row: int) -> list[str]:
    """Return the two phases that grew most at a row against their medians."""
    grown = table.seconds[row] - np.median(table.seconds, axis=0)
    return [table.names[column] for column in np.argsort(-grown)[:2]]
