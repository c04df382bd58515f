"""Rule ``disk_space``: the disk came near its end while the run was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backlight.monitors.grokking.model.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("disk_space", monitor="grokking")
def disk_space(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """State the first warning of each attempt about free disk space, and what was done."""
    told: set[int] = set()
    for event in run.events("disk_warning"):
        if event.attempt in told:
            continue
        told.add(event.attempt)
        free, wanted = event.payload.get("free"), event.payload.get("threshold")
        action = str(event.payload.get("action") or "").rstrip(".")
        yield Finding(
            rule="disk_space",
            severity=Severity.WARNING,
            claim=(
                f"{_size(free)} were free on the disk of the run, below the {_size(wanted)} that it was to "
                f"leave.{f' {action[0].upper()}{action[1:]}.' if action else ''}"
            ),
            subject=Subject(step=event.step),
            evidence=(Evidence("events/disk_warning", event.step, free, "B"),),
            next_check="Free some space, or record less: a sparser cadence, top-k, Gram or scalars only.",
            refuted_if="df on the disk of the run shows more than was noted.",
        )


def _size(amount: Any) -> str:
    if not isinstance(amount, (int, float)) or isinstance(amount, bool):
        return "an unknown number of bytes"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount:g} B"
