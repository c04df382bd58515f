"""Rule ``recompute_without_need``: forwards are computed again though memory would hold them."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import circumstances, ms, percent, plural, read_profile, size
from backlight.records import Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("recompute_without_need", monitor="steptime", thresholds=("recompute_share", "recompute_memory"))
def recompute_without_need(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find checkpointing that costs a share of the step while much of the memory is free."""
    profiled = read_profile(run)
    step = profiled.step_ms if profiled is not None else None
    told = circumstances(run)
    if profiled is None or not step:
        return
    memory = (
        profiled.content.get("memory") or (told.payload.get("memory") if told is not None else None) or {}
    )
    peak, capacity = float(memory.get("peak") or 0.0), float(memory.get("capacity") or 0.0)
    again = {
        str(m["name"]): float(m["recomputed_ms"]) for m in profiled.rows("modules") if m["recomputed_ms"]
    }
    # Of nested modules the outermost alone counts.
    outer = {name: spent for name, spent in again.items() if not any(_inside(name, o) for o in again)}
    share = sum(outer.values()) / step
    if share <= limits.recompute_share or peak <= 0 or capacity <= 0:
        return
    if peak / capacity >= limits.recompute_memory:
        return
    worst = max(outer, key=lambda name: outer[name])
    yield Finding(
        severity=Severity.INFO,
        title=f"Recomputation takes {percent(share)} of a step although memory is free",
        detail=(
            f"Forwards that are computed again in backward take {ms(sum(outer.values()))}, {percent(share)} "
            "of a "
            f"step, in {plural(len(outer), 'module')} ({worst} most), while the peak of memory is "
            f"{size(peak)} of {size(capacity)} ({percent(peak / capacity)}). "
            f"Expected gain: at most {percent(share)} of a step."
        ),
        subject=Subject(module=worst or None, phase=Phase.BACKWARD),
        evidence=(
            profiled.evidence(f"modules/{worst}/recomputed_ms", outer[worst], "ms"),
            profiled.evidence("memory/peak", peak, "bytes"),
            profiled.evidence("memory/capacity", capacity, "bytes"),
        ),
        fix=("Checkpoint fewer blocks, or none; `backlight memory RECIPE --fake` predicts the peak without."),
        refuted_if="the training without checkpointing does not fit, or takes as long.",
    )


def _inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))
