"""Time of the profiled steps by module, forward and backward."""

from __future__ import annotations

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.profile_tables import NONE, Figures, count, figures, ms, profile_of, rows_of
from backlight.report.source import Source


@panel(
    "modules",
    title="Time by module",
    order=101,
    series=("profile/modules",),
    note="Host milliseconds of a traced step, forward and backward; own time is without the modules inside.",
    monitor="steptime",
)
def modules(source: Source) -> Drawn | NotMeasured:
    """List the modules, those with the most time of their own first."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    rows = rows_of(profile, "modules")
    if not rows:
        return NotMeasured("No step was traced.")
    keys = ("forward_ms", "forward_exclusive_ms", "backward_ms", "backward_exclusive_ms", "recomputed_ms")
    rows.sort(key=lambda r: -(r.get("forward_exclusive_ms", 0) + r.get("backward_exclusive_ms", 0)))
    table = Figures(
        "",
        ("Module", "Calls", "Forward", "own", "Backward", "own", "Recomputed"),
        [
            [row.get("name") or "(model)", count(row.get("calls")), *(ms(row.get(k)) for k in keys)]
            for row in rows
        ],
        frozenset(range(1, 7)),
    )
    missing = profile.get("backward_unattributed_ms")
    remark = (
        f"{ms(missing)} ms of backward belong to no module: the loss, sums of gradients." if missing else ""
    )
    return figures([table], [remark] if remark else [])
