"""The learning rate of every parameter group."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart, spans_decades
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source

SHOWN = 8
"""Lines that one chart can tell apart."""


@panel("learning_rates", title="Learning rates", order=80, series=("scalars/lr",), monitor="health")
def learning_rates(source: Source) -> Drawn | NotMeasured:
    """Draw one line per optimizer and group; groups with the same rate at every step share a line."""
    seen: dict[bytes, tuple[list[str], Line]] = {}
    names = source.scalar_names("lr")
    for name in names:
        rate = source.scalar(name)
        if not len(rate.steps):
            continue
        optimizer, _, group = name.removeprefix("lr/").partition("/")
        label = f"optimizer {optimizer}, group {group}" if group else f"optimizer {optimizer}"
        line = Line(label, rate.steps, rate.values, style="steps")
        key = rate.steps.tobytes() + rate.values.tobytes()
        seen.setdefault(key, ([], line))[0].append(label)
    if not seen:
        return NotMeasured(source.reason("lr", otherwise="No optimizer step was seen."))
    lines = []
    for labels, line in list(seen.values())[:SHOWN]:
        label = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
        lines.append(Line(label, line.steps, line.values, style="steps"))
    remarks = []
    if len(seen) > SHOWN:
        remarks.append(f"{len(seen)} different schedules were recorded; the first {SHOWN} are drawn.")
    log = spans_decades(*(line.values for line in lines), factor=1000.0)
    high = max((float(np.nanmax(line.values)) for line in lines), default=1.0)
    axis = Axis("learning rate", log=log, low=None if log or high <= 0 else 0.0)
    return Drawn("lines", {"charts": [chart(lines, axis)]}, (), tuple(remarks))
