"""Rule ``slow_optimizer``: the optimizer updates one parameter at a time, and that takes time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.findings.limits import limit
from backlight.monitors.steptime.model.evidence import (
    SteadyLimits,
    info_evidence,
    percent,
    phase_evidence,
    read_runtime_info,
    steady_phases,
)
from backlight.records import Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch that have a fused implementation on every device."""


@dataclass(frozen=True)
class SlowOptimizerLimits(SteadyLimits):
    """Limits of the rule ``slow_optimizer``."""

    optimizer_share: float = limit(
        0.1, "share of a step in the optimizer; a fused update of a usual model takes 1 to 5 %", high=1.0
    )
    optimizer_floor: float = limit(
        1e-3,
        "seconds in the optimizer below which nothing is gained: a tiny step is bound by Python's calls",
        high=10.0,
    )


@rule("slow_optimizer", monitor="steptime", version=2, limits=SlowOptimizerLimits)
def slow_optimizer(run: Run, limits: SlowOptimizerLimits) -> Iterator[Finding]:
    """Find an optimizer that loops over parameters where one call would do."""
    table, info = steady_phases(run, limits), read_runtime_info(run)
    if table is None or info is None:
        return
    seconds = table.phase(Phase.OPTIMIZER)
    share = float(np.median(seconds / table.total))
    slow = [group for group in info.payload.get("optimizers") or () if _is_loop(group)]
    if share <= limits.optimizer_share or np.median(seconds) < limits.optimizer_floor or not slow:
        return
    group = max(slow, key=lambda one: int(one.get("tensors", 0)))
    kind, tensors = str(group["type"]), int(group.get("tensors", 0))
    option = "fused=True" if kind in FUSED else "foreach=True"
    yield Finding(
        severity=Severity.WARNING,
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


def _is_loop(group: Mapping[str, Any]) -> bool:
    return not group.get("fused") and not group.get("foreach") and int(group.get("tensors", 0)) > 1
