"""Rule ``data_bound``: steps wait for data; a claim with a control, a suspicion without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import percent, phase, read_profile, steady_phases
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

CONTROL = "cached batch"
"""Name of the control that feeds one batch again and again."""


@rule("data_bound", monitor="steptime", thresholds=("steady_steps", "data_share", "data_match"))
def data_bound(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find a share of the steady steps in the data loader, and ask the control whether it costs time.

    A loader may be waited for because the step is over early, or because something else holds the
    processor; only a step that becomes faster with a cached batch was bound by data.
    """
    table = steady_phases(run, limits)
    if table is None:
        return
    share = float(np.median(table.phase(Phase.DATA) / table.total))
    if share <= limits.data_share:
        return
    evidence = [phase(table, Phase.DATA)]
    control = _control(run)
    gained = None if control is None else control[1]
    if gained is not None and gained < limits.data_match * share:
        return  # the control refutes it: the time is spent elsewhere all the same
    wait = f"Waiting for data takes {percent(share)} of a steady step ({len(table.steps)} steps)"
    if gained is None:
        claim = (
            f"Suspicion without a control: {wait[0].lower()}{wait[1:]}. Whether the step would be faster "
            f"without it is not measured. Expected gain: at most {percent(share)} of a step."
        )
    else:
        evidence += [control[0]] if control is not None else []
        claim = (
            f"{wait}, and with a cached batch a step is {percent(gained)} shorter: the training is bound by "
            f"its data. Expected gain: {percent(min(gained, share))} of a step."
        )
    yield Finding(
        severity=Severity.INFO if gained is None else Severity.WARNING,
        title=(
            f"Waiting for data takes {percent(share)} of a step"
            if gained is None
            else f"The step is bound by data loading: {percent(gained)} shorter with a cached batch"
        ),
        detail=claim,
        subject=Subject(phase=Phase.DATA, step=int(table.steps[0])),
        evidence=tuple(evidence),
        fix=(
            "Run `backlight profile --confirm` on the same script: it takes the steps again with a cached "
            "batch."
            if gained is None
            else "Raise num_workers and prefetch_factor, set persistent_workers, or move the decoding out of "
            "the training; then compare both runs."
        ),
        refuted_if="a run with a cached batch, all else equal, is not faster by at least half of the wait.",
    )


def _control(run: Run) -> tuple[Evidence, float] | None:
    """Return the evidence of a control with a cached batch, and the share of a step that it saved."""
    profiled = read_profile(run)
    for row in profiled.rows("controls") if profiled is not None else []:
        saved = _saved(row)
        if row.get("name") == CONTROL and profiled is not None and saved is not None:
            return profiled.evidence(f"controls/{CONTROL}", float(row["ratio"]), "of a step"), saved
    return None


def _saved(row: Mapping[str, Any]) -> float | None:
    """Return what a control saved, from the ratio of its step to the usual one; 0 within its interval."""
    ratio, high = row.get("ratio"), row.get("high")
    if ratio is None:
        return None
    return max(0.0, 1.0 - float(ratio)) if high is None or float(high) < 1.0 else 0.0
