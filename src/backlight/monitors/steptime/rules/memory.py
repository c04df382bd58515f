"""Rule ``memory``: memory lost to fragmentation or to whole logits, and recomputation without need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import (
    info_evidence,
    peak_memory,
    percent,
    read_profile,
    read_runtime_info,
)
from backlight.records import Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, duration, size


@dataclass(frozen=True)
class MemoryLimits(Limits, monitor="steptime"):
    """Limits of the rule ``memory``."""

    fragmentation_share: float = limit(
        0.25, "share of the reserved memory that no tensor used at the peak", high=1.0
    )
    fragmentation_bytes: float = limit(2.0**28, "bytes below which that share is irrelevant (256 MiB)")
    logits_share: float = limit(0.2, "share of the peak memory that logits and their copies take", high=1.0)
    logits_bytes: float = limit(2.0**26, "bytes below which rewriting a loss is not worth it (64 MiB)")
    recompute_share: float = limit(0.05, "share of a step spent on recomputed forwards", high=1.0)
    recompute_memory: float = limit(
        0.6, "share of the memory below which the peak leaves space for what checkpointing saves", high=1.0
    )


@rule("memory", monitor="steptime", limits=MemoryLimits, is_statistic=True)
def memory(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find memory that could be free, and recomputation although memory is free."""
    for find in (_fragmentation, _logits, _recomputation):
        yield from find(run, limits)


def _fragmentation(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find an allocator that reserves far more than was ever in use, or that had to empty its cache."""
    info = read_runtime_info(run)
    memory = (info.payload.get("memory") or {}) if info is not None else {}
    if info is None or not memory.get("reserved"):
        return
    reserved, used = float(memory["reserved"]), float(memory.get("peak") or 0.0)
    retries = int(memory.get("retries") or 0)
    lost = reserved - used
    is_fragmented = lost >= limits.fragmentation_bytes and lost / reserved > limits.fragmentation_share
    if not is_fragmented and not retries:
        return
    retried = (
        f" It emptied its cache and retried {count(retries, 'time')}, which waits for the device."
        if retries
        else ""
    )
    yield Finding(
        severity=Severity.WARNING if retries else Severity.INFO,
        title=f"{size(lost)} of GPU memory is lost to fragmentation",
        detail=(
            f"At its peak the allocator had reserved {size(reserved)} and {size(used)} were in use: "
            f"{size(lost)} ({percent(lost / reserved)}) were free between blocks.{retried} Expected gain: up "
            f"to {size(lost)} of memory."
        ),
        subject=Subject(rank=info.rank),
        evidence=(info_evidence(info, reserved, "bytes reserved"), info_evidence(info, used, "bytes in use")),
        fix=(
            "Set `PYTORCH_ALLOC_CONF=expandable_segments:True`, or pad batches to a few lengths: changing "
            "shapes leave holes."
        ),
        refuted_if="reserved memory stays the same with expandable segments.",
    )


def _logits(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find logits that take memory: elements times (bytes of their type + 4 of the fp32 copy).

    The peak is that of the device, or of the process where there is none.
    """
    profile = read_profile(run)
    logits = profile.content.get("logits") if profile is not None else None
    if profile is None or not logits or profile.state("chunked loss") == "on":
        return
    shape = [int(length) for length in logits["shape"]]
    taken = math.prod(shape) * (int(logits["itemsize"]) + 4)
    peak, _ = peak_memory(run, profile)
    if taken < limits.logits_bytes or peak <= 0 or taken / peak <= limits.logits_share:
        return
    share = min(1.0, taken / peak)
    yield Finding(
        severity=Severity.INFO,
        title=f"Logits take {percent(share)} of the peak memory",
        detail=(
            f"Logits of shape {' x '.join(map(str, shape))} in {logits['dtype']} and their fp32 copy take "
            f"{size(taken)}, {percent(share)} of the peak of {size(peak)}. Expected gain: up to "
            f"{size(taken)} of memory with a chunked loss."
        ),
        subject=Subject(),
        evidence=(profile.evidence("logits", taken, "bytes"), profile.evidence("memory/peak", peak, "bytes")),
        fix=(
            "Compute the loss over chunks of tokens, or with a fused linear cross entropy, so that the "
            "logits of all tokens never exist at once; `backlight memory` shows the live tensors before and "
            "after."
        ),
        refuted_if="the memory peak is elsewhere in the step and does not fall with a chunked loss.",
    )


def _recomputation(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
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
        name: spent
        for name, spent in recomputed.items()
        if not name or ("" not in recomputed and not any(name.startswith(f"{o}.") for o in recomputed))
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
            f"Recomputed forwards take {duration(spent / 1e3)}, {share} of a step, in "
            f"{count(len(outer), 'module')} (most in `{worst}`), while the peak memory is {size(peak)} of "
            f"{size(capacity)} ({percent(peak / capacity)}). Expected gain: at most {share} of a step."
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
