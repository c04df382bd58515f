"""What was collected while a training stood still: stacks and thread states, and what could not be had."""

from __future__ import annotations

from backlight.report.evidence_links import collected
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible


@panel(
    "evidence",
    title="Evidence of stalls",
    order=115,
    series=("evidence", "events/stall"),
    note="Stacks, thread states and the board of each process at the time of a verdict.",
    monitor="stalls",
)
def evidence(source: Source) -> Drawn | NotMeasured:
    """Show the files that verdicts cite, and say what could not be collected."""
    found = collected(source)
    if not found.files and not found.missing:
        return NotMeasured("No verdict on a stall needed evidence.")
    missing = [{"rank": rank, "reason": reason} for rank, reason in found.missing]
    remarks = (f"{found.more} more files stand in the run directory.",) if found.more else ()
    files = [{"path": visible(path), "text": text} for path, text in found.files]
    return Drawn("dumps", {"files": files, "missing": missing}, (), remarks)
