"""The thresholds by which the findings were made, and which of them the user changed."""

from __future__ import annotations

from typing import Any

from backlight.report.panel import Drawn, panel
from backlight.report.source import Source
from backlight.report.text import number, visible


@panel("thresholds", title="Thresholds", order=140, series=("thresholds",))
def thresholds(source: Source) -> Drawn:
    """List the thresholds in use by room; without them from the caller, those that were overridden."""
    overridden: dict[str, dict[str, float]] = {room: dict(v) for room, v in source.run.overrides.items()}
    known = {room: dict(values) for room, values in source.thresholds.items()}
    for room, changed in overridden.items():
        known.setdefault(room, {}).update(changed)
    rows: list[dict[str, Any]] = [
        {
            "room": visible(room),
            "name": visible(name),
            "value": number(value, 6) if isinstance(value, (int, float)) else visible(value),
            "changed": name in overridden.get(room, {}),
        }
        for room in sorted(known)
        for name, value in known[room].items()
    ]
    if not rows:
        return Drawn("words", {"text": "Every threshold has its default; none was overridden."})
    remarks = (
        () if source.thresholds else ("Only overridden thresholds are known here; all others are defaults.",)
    )
    return Drawn("thresholds", {"rows": rows}, (), remarks)
