"""The verdicts on stalls, as the sidecar stored them: a reader has nothing to add to what it saw."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.records import Finding
from backlight.registry import rule
from backlight.stalls.thresholds import Thresholds
from backlight.store.reader import Run


@rule("stall", room="stalls", version=1)
def stall(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Give every stored verdict once: a process that stood still cannot be looked at again."""
    said = set()
    for finding in run.stored_findings():
        what = (finding.claim, finding.subject.step)
        if finding.rule == "stall" and what not in said:
            said.add(what)
            yield finding
