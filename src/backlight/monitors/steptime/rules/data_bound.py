"""Rule ``data_bound``: steps wait for data; a warning with a control, a suspicion without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.findings.limits import limit
from backlight.monitors.steptime.model.evidence import (
    FORMULAS,
    SteadyLimits,
    percent,
    phase_evidence,
    read_profile,
    steady_phases,
)
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

CONTROL = "cached batch"
"""Name of the control that repeats one batch."""


@dataclass(frozen=True)
class DataBoundLimits(SteadyLimits):
    """Limits of the rule ``data_bound``."""

    data_share: float = limit(0.1, "share of a steady step spent waiting for data", source=FORMULAS, high=1.0)
    data_match: float = limit(
        0.5, "share of the wait that a cached batch must save before data is the cause", high=1.0
    )


@rule("data_bound", monitor="steptime", limits=DataBoundLimits)
def data_bound(run: Run, limits: DataBoundLimits) -> Iterator[Finding]:
    """Find a share of the steady steps in the data loader, and whether the control shows that it costs time.

    A step may wait for its loader because it is over early, or because something else holds the processor;
    only a step that becomes faster with a cached batch is bound by data.
    """
    table = steady_phases(run, limits)
    if table is None:
        return
    share = float(np.median(table.phase(Phase.DATA) / table.total))
    if share <= limits.data_share:
        return
    evidence = [phase_evidence(table, Phase.DATA)]
    wait = f"Waiting for data takes {percent(share)} of a steady step ({len(table.steps)} steps)"
    control = _control(run)
    if control is None:
        severity = Severity.INFO
        title = f"Waiting for data takes {percent(share)} of a step"
        detail = (
            f"{wait}. Whether the step would be faster without the wait is not measured: there is no "
            f"control. Expected gain: at most {percent(share)} of a step."
        )
        fix = (
            "Run `backlight profile --confirm` on the same script: it repeats the steps with a cached batch."
        )
    else:
        found, saved = control
        if saved < limits.data_match * share:
            return  # the control refutes it: the time is spent elsewhere all the same
        evidence.append(found)
        severity = Severity.WARNING
        title = f"The step is bound by data loading: {percent(saved)} shorter with a cached batch"
        detail = (
            f"{wait}, and with a cached batch a step is {percent(saved)} shorter: data loading is the "
            f"bottleneck. Expected gain: {percent(min(saved, share))} of a step."
        )
        fix = (
            "Raise num_workers and prefetch_factor, set persistent_workers, or decode the data ahead of "
            "training; then compare both runs."
        )
    yield Finding(
        severity=severity,
        title=title,
        detail=detail,
        subject=Subject(phase=Phase.DATA, step=int(table.steps[0])),
        evidence=tuple(evidence),
        fix=fix,
        refuted_if="a run with a cached batch, all else equal, is not faster by at least half of the wait.",
    )


def _control(run: Run) -> tuple[Evidence, float] | None:
    """Return the evidence of a control with a cached batch, and the share of a step that it saved."""
    profile = read_profile(run)
    for row in profile.rows("controls") if profile is not None else []:
        if profile is not None and row.get("name") == CONTROL and row.get("ratio") is not None:
            return profile.evidence(f"controls/{CONTROL}", float(row["ratio"]), "of a step"), _saved(row)
    return None


def _saved(row: Mapping[str, Any]) -> float:
    """Return what a control saved, from the ratio of its step to the usual one; 0 within its interval."""
    high = row.get("high")
    return max(0.0, 1.0 - float(row["ratio"])) if high is None or float(high) < 1.0 else 0.0
