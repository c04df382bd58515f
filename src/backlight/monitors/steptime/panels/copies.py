"""Copies in the profiled steps, with the line that asked for each."""

from __future__ import annotations

from typing import Any

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.profile_tables import NONE, Figures, count, figures, ms, profile_of, rows_of, share
from backlight.report.source import Source


@panel(
    "copies",
    title="Copies",
    order=104,
    series=("profile/copies",),
    note="Calls of aten::copy_ in a traced step by type, layout and line of Python.",
    monitor="steptime",
)
def copies(source: Source) -> Drawn | NotMeasured:
    """List copies, the most expensive first."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    if profile.get("copies") is None:
        return NotMeasured("No step was traced.")
    rows = rows_of(profile, "copies")
    if not rows:
        return NotMeasured("The traced step copied nothing.")
    key = "device_ms" if profile.get("device") else "host_ms"
    cells = [
        [_types(r), _layout(r.get("contiguous")), count(r.get("calls")), count(r.get("elements")),
         ms(r.get(key)), share(r.get("share")), str(r.get("line") or "not recorded")]
        for r in rows
    ]  # fmt: skip
    titles = ("Types", "Layout", "Calls", "Elements", "Time", "Of step", "Line")
    return figures([Figures("", titles, cells, frozenset({2, 3, 4, 5}))])


def _types(row: dict[str, Any]) -> str:
    return f"{row['source']} → {row.get('target')}" if row.get("source") else "not recorded"


def _layout(contiguous: Any) -> str:
    return "not recorded" if contiguous is None else "alike" if contiguous else "differs"
