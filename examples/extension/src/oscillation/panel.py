"""A panel: the share over the steps, on the page of ``backlight report``."""

from __future__ import annotations

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source


@panel(
    "oscillation",
    title="Gradients that change their sign",
    order=25,
    series=("scalars/oscillation",),
    note="Share of entries whose sign is not that of the recorded step before.",
    monitor="oscillation",
)
def oscillation(source: Source) -> Drawn | NotMeasured:
    """Draw the share; chance gives a half."""
    flipped = source.scalar("oscillation/flipped")
    if not len(flipped.steps):
        return NotMeasured("The monitor oscillation did not measure this run.")
    lines = [Line("changed sign", flipped.steps, flipped.values, tone="first")]
    return Drawn("lines", {"charts": [chart(lines, Axis("share of entries"))]})
