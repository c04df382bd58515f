"""Rule ``memory_fragmentation``: memory is reserved on the device and no tensor can use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import info_evidence, percent, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, size


@dataclass(frozen=True)
class MemoryFragmentationLimits(Limits, monitor="steptime"):
    """Limits of the rule ``memory_fragmentation``."""

    fragmentation_share: float = limit(
        0.25, "share of the reserved memory that no tensor used at the peak", high=1.0
    )
    fragmentation_bytes: float = limit(2.0**28, "bytes below which that share is irrelevant (256 MiB)")


@rule("memory_fragmentation", monitor="steptime", limits=MemoryFragmentationLimits)
def memory_fragmentation(run: Run, limits: MemoryFragmentationLimits) -> Iterator[Finding]:
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
        evidence=(
            info_evidence(info, reserved, "bytes reserved"),
            info_evidence(info, used, "bytes in use"),
        ),
        fix=(
            "Set `PYTORCH_ALLOC_CONF=expandable_segments:True`, or pad batches to a few lengths: changing "
            "shapes leave holes."
        ),
        refuted_if="reserved memory stays the same with expandable segments.",
    )
