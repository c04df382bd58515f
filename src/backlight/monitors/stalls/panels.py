"""Evidence of stalls: stacks and thread states, and what could not be collected."""

from __future__ import annotations

from backlight.report.evidence_links import collected
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible


@panel(
    "evidence",
    title="Evidence of stalls",
    order=9,
    series=("evidence", "events/stall"),
    note="Stacks, thread states and shared state of each process at the time of a diagnosis.",
    monitor="stalls",
)
def evidence(source: Source) -> Drawn | NotMeasured:
    """Show the files that diagnoses cite, and what could not be collected."""
    texts = collected(source)
    if not texts.files and not texts.missing:
        return NotMeasured("No stall was diagnosed.")
    missing = [{"rank": rank, "reason": reason} for rank, reason in texts.missing]
    remarks = (f"{texts.more} more files are in the run directory.",) if texts.more else ()
    files = [{"path": visible(path), "text": text} for path, text in texts.files]
    return Drawn("dumps", {"files": files, "missing": missing}, (), remarks)
