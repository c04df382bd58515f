"""Rule ``slow_optimizer``: the optimizer updates one parameter at a time, and that takes time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import (
    CIRCUMSTANCES,
    circumstances,
    percent,
    phase,
    plural,
    steady_phases,
)
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch that have a fused way on every device."""


@rule(
    "slow_optimizer",
    monitor="steptime",
    version=2,
    thresholds=("steady_steps", "optimizer_share", "optimizer_floor"),
)
def slow_optimizer(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find an optimizer that loops over parameters where one call could do."""
    table, told = steady_phases(run, limits), circumstances(run)
    if table is None or told is None:
        return
    seconds = table.phase(Phase.OPTIMIZER)
    share = float(np.median(seconds / table.total))
    slow = [group for group in told.payload.get("optimizers") or () if _loops(group)]
    if share <= limits.optimizer_share or np.median(seconds) < limits.optimizer_floor or not slow:
        return
    group = max(slow, key=lambda one: int(one.get("tensors", 0)))
    kind, tensors = str(group["type"]), int(group.get("tensors", 0))
    way = "fused=True" if kind in FUSED else "foreach=True"
    yield Finding(
        severity=Severity.WARNING,
        title=f"{kind} updates its {plural(tensors, 'tensor')} one by one ({percent(share)} of a step)",
        detail=(
            f"The optimizer takes {percent(share)} of a steady step, and {kind} updates its "
            f"{plural(tensors, 'tensor')} one by one: neither fused nor foreach is in use. "
            f"Expected gain: most of {percent(share)} of a step."
        ),
        subject=Subject(phase=Phase.OPTIMIZER),
        evidence=(
            phase(table, Phase.OPTIMIZER),
            Evidence(f"events/{CIRCUMSTANCES}", told.step, f"{kind}: fused off, foreach off"),
        ),
        fix=f"Make it {kind}(..., {way}) and compare: `backlight compare --ab` on both commands.",
        refuted_if=f"the same training with {way} spends as long in the optimizer.",
    )


def _loops(group: Mapping[str, Any]) -> bool:
    return not group.get("fused") and not group.get("foreach") and int(group.get("tensors", 0)) > 1
