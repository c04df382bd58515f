"""The thresholds by which the findings were made, and which of them the user changed."""

from __future__ import annotations

from typing import Any

from backlight.report.panel import Drawn, panel
from backlight.report.source import Source
from backlight.text import number, visible


@panel("thresholds", title="Thresholds", order=140, series=("thresholds",))
def thresholds(source: Source) -> Drawn:
    """List the thresholds in use by monitor; without them from the caller, those that were overridden."""
    overridden: dict[str, dict[str, float]] = {
        monitor: dict(v) for monitor, v in source.run.overrides.items()
    }
    known = {monitor: dict(values) for monitor, values in source.thresholds.items()}
    for monitor, changed in overridden.items():
        known.setdefault(monitor, {}).update(changed)
    rows: list[dict[str, Any]] = [
        {
            "monitor": visible(monitor),
            "name": visible(name),
            "value": number(value, 6) if isinstance(value, (int, float)) else visible(value),
            "changed": name in overridden.get(monitor, {}),
        }
        for monitor in sorted(known)
        for name, value in known[monitor].items()
    ]
    if not rows:
        return Drawn("words", {"text": "Every threshold has its default; none was overridden."})
    remarks = (
        () if source.thresholds else ("Only overridden thresholds are known here; all others are defaults.",)
    )
    return Drawn("thresholds", {"rows": rows}, (), remarks)
