"""How far each step moved the weights, relative to their size."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number


@panel(
    "updates",
    title="Update to weight",
    order=50,
    series=("series/update",),
    note="Norm of the step that the optimizer took over the norm of the weights before it, across "
    "parameters. An estimate from a fixed sample of each tensor, exact where the sample is the whole.",
    monitor="health",
)
def updates(source: Source) -> Drawn | NotMeasured:
    """Draw the spread of the ratio over parameters at every step."""
    frames = source.frames
    spread = frames.ratio_spread
    if spread is None or not np.isfinite(spread).any():
        return NotMeasured(source.reason("update", "ratio", otherwise="No update was recorded."))
    steps = frames.steps["update"]
    lines = [
        Line("largest", steps, spread[4], tone="fourth", gaps=True),
        Line("middle 80 %", steps, spread[3], style="edge", tone="first", down_to="lower tenth", gaps=True),
        Line("lower tenth", steps, spread[1], style="edge", tone="first", gaps=True),
        Line("median", steps, spread[2], tone="first", gaps=True),
    ]
    facts = [Fact("median over run", number(float(np.nanmedian(spread[2]))))]
    still = int(np.count_nonzero(frames.stats["ratio_max"] == 0))
    if still:
        facts.append(Fact("parameters that never moved", number(still)))
    return Drawn("lines", {"charts": [chart(lines, Axis("update / weight", log=True))]}, tuple(facts))
