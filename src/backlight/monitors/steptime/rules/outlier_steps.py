"""Rule ``outlier_steps``: single steps take many times the median, and what they spent it on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from backlight.monitors.steptime.model.phase_times import PREFIX, Recorded
from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import ms, percent, plural, steady_phases
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

COLLECTION = "garbage_collection"
"""Kind of the event, and cause, of a pause by Python's garbage collector."""

_CHECKS = {
    COLLECTION: "Call gc.freeze() after setup and gc.disable() with a gc.collect() every so many steps.",
    "data": "Look at the loader: shuffling, a new epoch that starts workers anew (persistent_workers=True).",
    "evaluation": "It is evaluation inside the loop: count it apart, or do it less often.",
    "checkpoint": "Saving inside the loop: save asynchronously, or less often.",
}


@rule(
    "outlier_steps",
    monitor="steptime",
    version=2,
    thresholds=("steady_steps", "outlier_factor", "outlier_deviations", "outlier_floor", "outlier_loss"),
)
def outlier_steps(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find steps far above the median, by cause: a garbage collection, or the phase that grew most.

    One finding for each cause whose outliers cost a share of the training.
    """
    table = steady_phases(run, limits)
    if table is None:
        return
    total = table.total
    median = float(np.median(total))
    spread = 1.4826 * float(np.median(np.abs(total - median)))
    least = max(limits.outlier_deviations * spread, limits.outlier_floor)
    far = (total > limits.outlier_factor * median) & (total - median > least)
    rows = np.flatnonzero(far)
    pauses: dict[int, float] = defaultdict(float)
    for event in run.events(COLLECTION):
        if event.step is not None and event.attempt == run.attempts[-1].index:
            pauses[event.step] += float(event.payload.get("seconds") or 0.0)
    by_cause: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        by_cause[_cause(table, row, median, pauses)].append(row)
    for cause, members in sorted(by_cause.items(), key=lambda item: -float(total[item[1]].sum())):
        lost = float((total[members] - median).sum() / total.sum())
        if lost <= limits.outlier_loss:
            continue
        worst = members[int(np.argmax(total[members]))]
        step = int(table.steps[worst])
        evidence = [Evidence(f"scalars/{PREFIX}{n}", step, float(table.phase(n)[worst]), "s")
                    for n in _largest(table, worst)]  # fmt: skip
        if cause == COLLECTION:
            evidence.insert(0, Evidence(f"events/{COLLECTION}", step, pauses[step], "s"))
        words = (
            "Python's garbage collection runs in them"
            if cause == COLLECTION
            else f"the time goes into {cause.replace('_', ' ')}"
        )
        yield Finding(
            severity=Severity.INFO if cause == "evaluation" else Severity.WARNING,
            title=f"{plural(len(members), 'step')} took up to {total[worst] / median:.1f} times the median",
            detail=(
                f"{plural(len(members), 'step')} of {len(total)} take up to {total[worst] / median:.1f} "
                "times the "
                f"median of {ms(1e3 * median)} (step {step}: {ms(1e3 * float(total[worst]))}); {words}. "
                f"Expected gain: at most {percent(lost)} of the time."
            ),
            subject=Subject(step=step, phase=None if cause == COLLECTION else cause),
            evidence=tuple(evidence),
            fix=_CHECKS.get(
                cause, "Look at what the script does at these steps, and at the machine: who else ran then?"
            ),
            refuted_if=(
                "the same training again has its outliers at other steps, or none: the machine was busy."
            ),
        )


def _cause(table: Recorded, row: int, median: float, pauses: dict[int, float]) -> str:
    excess = float(table.total[row]) - median
    if pauses.get(int(table.steps[row]), 0.0) > excess / 2:
        return COLLECTION
    return _largest(table, row)[0]


def _largest(table: Recorded, row: int) -> list[str]:
    """Return the phases that grew most at a row against their medians, at most two."""
    grown = table.seconds[row] - np.median(table.seconds, axis=0)
    return [table.names[column] for column in np.argsort(-grown)[:2]]
