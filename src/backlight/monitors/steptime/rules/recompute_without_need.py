"""Rule ``recompute_without_need``: checkpointing costs time while memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import ms, peak_memory, percent, read_profile
from backlight.records import Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, size


@dataclass(frozen=True)
class RecomputeWithoutNeedLimits(Limits, monitor="steptime"):
    """Limits of the rule ``recompute_without_need``."""

    recompute_share: float = limit(0.05, "share of a step spent on recomputed forwards", high=1.0)
    recompute_memory: float = limit(
        0.6, "share of the memory below which the peak leaves space for what checkpointing saves", high=1.0
    )


@rule("recompute_without_need", monitor="steptime", limits=RecomputeWithoutNeedLimits)
def recompute_without_need(run: Run, limits: RecomputeWithoutNeedLimits) -> Iterator[Finding]:
    """Find checkpointing that costs a share of the step while much of the memory is free."""
    profile = read_profile(run)
    step = profile.step_ms if profile is not None else None
    if profile is None or not step:
        return
    recomputed = {
        str(m["name"]): float(m["recomputed_ms"]) for m in profile.rows("modules") if m["recomputed_ms"]
    }
    # Of nested modules only the outermost counts.
    outer = {
        name: spent for name, spent in recomputed.items() if not any(_is_inside(name, o) for o in recomputed)
    }
    spent = sum(outer.values())
    peak, capacity = peak_memory(run, profile)
    if spent / step <= limits.recompute_share or peak <= 0 or capacity <= 0:
        return
    if peak / capacity >= limits.recompute_memory:
        return
    worst = max(outer, key=lambda name: outer[name])
    share = percent(spent / step)
    yield Finding(
        severity=Severity.INFO,
        title=f"Checkpointing takes {share} of a step although memory is free",
        detail=(
            f"Recomputed forwards take {ms(spent)}, {share} of a step, in {count(len(outer), 'module')} "
            f"(most in `{worst}`), while the peak memory is {size(peak)} of {size(capacity)} "
            f"({percent(peak / capacity)}). Expected gain: at most {share} of a step."
        ),
        subject=Subject(module=worst or None, phase=Phase.BACKWARD),
        evidence=(
            profile.evidence(f"modules/{worst}/recomputed_ms", outer[worst], "ms"),
            profile.evidence("memory/peak", peak, "bytes"),
            profile.evidence("memory/capacity", capacity, "bytes"),
        ),
        fix="Checkpoint fewer blocks, or none; `backlight memory RECIPE --fake` predicts the peak.",
        refuted_if="the run without checkpointing does not fit, or takes as long.",
    )


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))
