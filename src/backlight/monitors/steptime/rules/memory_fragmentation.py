"""Rule ``memory_fragmentation``: memory is taken from the device and cannot be given to anybody."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import CIRCUMSTANCES, circumstances, percent, plural, size
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("memory_fragmentation", monitor="steptime", thresholds=("fragmentation_share", "fragmentation_bytes"))
def memory_fragmentation(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find an allocator whose reserve is far above what was ever in use, or that had to give up and retry."""
    told = circumstances(run)
    memory = (told.payload.get("memory") or {}) if told is not None else {}
    if told is None or not memory.get("reserved"):
        return
    reserved, used = float(memory["reserved"]), float(memory.get("peak") or 0.0)
    retries = int(memory.get("retries") or 0)
    lost = reserved - used
    apart = lost >= limits.fragmentation_bytes and lost / reserved > limits.fragmentation_share
    if not apart and not retries:
        return
    again = (
        f" The allocator freed its cache and tried again {plural(retries, 'time')}, which waits for the "
        "device."
        if retries
        else ""
    )
    yield Finding(
        severity=Severity.WARNING if retries else Severity.INFO,
        title=f"The allocator reserves {size(lost)} more than was ever in use",
        detail=(
            f"At its peak the allocator held {size(reserved)} of the device and had {size(used)} in use: "
            f"{size(lost)} ({percent(lost / reserved)}) lie between blocks.{again} "
            f"Expected gain: up to {size(lost)} of memory."
        ),
        subject=Subject(rank=told.rank),
        evidence=(
            Evidence(f"events/{CIRCUMSTANCES}", told.step, reserved, "bytes reserved"),
            Evidence(f"events/{CIRCUMSTANCES}", told.step, used, "bytes in use"),
        ),
        fix=(
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True, or pad batches to a few lengths: shapes that "
            "change leave holes."
        ),
        refuted_if="with expandable segments the reserve stays the same.",
    )
