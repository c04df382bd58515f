"""Rules on the phase times of the steady steps: a slow optimizer, outliers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings.limits import limit
from backlight.monitors.steptime.model.evidence import (
    GARBAGE_COLLECTION,
    BusyLimits,
    info_evidence,
    is_busy,
    percent,
    phase_evidence,
    read_runtime_info,
    steady_phases,
)
from backlight.monitors.steptime.model.step_times import PREFIX, PhaseTimes
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, duration

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch that have a fused implementation on every device."""


@dataclass(frozen=True)
class SlowOptimizerLimits(BusyLimits):
    """Limits of the rule ``slow_optimizer``."""

    optimizer_share: float = limit(
        0.1, "share of a step in the optimizer; a fused update of a usual model takes 1 to 5 %", high=1.0
    )
    optimizer_floor: float = limit(
        5e-3,
        "seconds in the optimizer below which nothing is gained: a tiny step is bound by Python's calls",
        high=10.0,
    )


@rule("slow_optimizer", monitor="steptime", version=2, limits=SlowOptimizerLimits)
def slow_optimizer(run: Run, limits: SlowOptimizerLimits) -> Iterator[Finding]:
    """Find an optimizer that loops over parameters where one call would do.

    The time is that of all optimizers: with several types of them it is not known whose it is.
    """
    table, info = steady_phases(run, limits), read_runtime_info(run)
    if table is None or info is None or is_busy(run, limits):
        return
    seconds = table.phase(Phase.OPTIMIZER)
    share = float(np.median(seconds / table.total))
    groups = info.payload.get("optimizers") or ()
    slow = [group for group in groups if not group["fused"] and not group["foreach"] and group["tensors"] > 1]
    if share <= limits.optimizer_share or np.median(seconds) < limits.optimizer_floor or not slow:
        return
    group = max(slow, key=lambda one: int(one["tensors"]))
    kind, tensors = str(group["type"]), int(group["tensors"])
    on_device = (info.payload.get("memory") or {}).get("where") == "device"
    # On a CPU, foreach is slower than the loop.
    if len({one["type"] for one in groups}) > 1 or (kind not in FUSED and not on_device):
        return
    option = "fused=True" if kind in FUSED else "foreach=True"
    yield Finding(
        severity=Severity.INFO,
        title=f"The optimizer takes {percent(share)} of a step: {kind} is not fused",
        detail=(
            f"The optimizer takes {percent(share)} of a steady step, and {kind} updates its "
            f"{count(tensors, 'tensor')} one by one: neither fused nor foreach is in use. Expected gain: "
            f"most of {percent(share)} of a step."
        ),
        subject=Subject(phase=Phase.OPTIMIZER),
        evidence=(
            phase_evidence(table, Phase.OPTIMIZER),
            info_evidence(info, f"{kind}: fused off, foreach off"),
        ),
        fix=f"Use `{kind}(..., {option})` and compare: `backlight compare --ab` on both commands.",
        refuted_if=f"the same run with `{option}` spends as long in the optimizer.",
    )


_FIXES = {
    GARBAGE_COLLECTION: (
        "Call gc.freeze() after setup and gc.disable() with a gc.collect() every so many steps."
    ),
    "data": "Check the loader: shuffling, or an epoch that restarts its workers, if it has any.",
    "evaluation": "This is evaluation inside the loop: measure it separately, or run it less often.",
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


@rule("outlier_steps", monitor="steptime", version=2, limits=OutlierStepsLimits)
def outlier_steps(run: Run, limits: OutlierStepsLimits) -> Iterator[Finding]:
    """Find steps far above the median, by cause: a garbage collection, or the phase that grew most.

    One finding for each cause whose outliers cost a share of the run.
    """
    table = steady_phases(run, limits)
    if table is None or is_busy(run, limits):
        return
    total = table.total
    median = float(np.median(total))
    spread = 1.4826 * float(np.median(np.abs(total - median)))
    least = max(limits.outlier_deviations * spread, limits.outlier_floor)
    rows = np.flatnonzero((total > limits.outlier_factor * median) & (total - median > least))
    pauses: dict[int, float] = defaultdict(float)
    for event in run.events(GARBAGE_COLLECTION):
        if event.step is not None and event.attempt == run.attempts[-1].index:
            pauses[event.step] += float(event.payload.get("seconds") or 0.0)
    by_cause: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        by_cause[_cause(table, row, median, pauses)].append(row)
    for cause, members in sorted(by_cause.items(), key=lambda item: -float(total[item[1]].sum())):
        lost = float((total[members] - median).sum() / total.sum())
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
