"""Health over steps, with the loss beside it."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart, spans_decades
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number, score


@panel(
    "health",
    title="Health and loss",
    order=10,
    series=("scalars/loss", "scalars/health", "health"),
    note="Health is 1 where no parameter vanishes or explodes, and 0 where a gradient holds NaN or Inf.",
    monitor="health",
)
def health(source: Source) -> Drawn | NotMeasured:
    """Draw the health score that the caller computed and the recorded loss."""
    lines, facts, remarks = [], [], []
    left, right = Axis("health (0 to 1)", low=0.0, high=1.0), None
    steps, values = source.health or (np.empty(0, np.int64), np.empty(0))
    scored = ~np.isnan(values)
    if scored.any():
        lines.append(Line("health", steps, values, tone="health", gaps=True))
        worst = int(np.nanargmin(values))
        at = "" if values[worst] == np.nanmax(values) else f" at step {number(int(steps[worst]))}"
        facts.append(Fact("lowest health", score(values[worst]) + at))
        facts.append(Fact("health at the end", score(values[scored][-1])))
        if not scored.all():
            remarks.append(f"Health was not measured at {number(int((~scored).sum()))} of the steps.")
    else:
        reason = source.reason("health", "gradient", otherwise="No gradient was recorded.")
        remarks.append(f"Health was not measured. {reason}")
    loss = source.scalar("loss")
    if len(loss.steps):
        axis = Axis("loss", log=spans_decades(loss.values))
        side = "right" if lines else "left"
        left, right = (left, axis) if lines else (axis, None)
        lines.append(Line("loss", loss.steps, loss.values, axis=side, tone="loss"))
        facts.append(Fact("loss, first to last", f"{number(loss.values[0])} to {number(loss.values[-1])}"))
    else:
        reason = source.reason("loss", otherwise="No backward pass gave one.")
        remarks.append(f"The loss was not measured. {reason}")
    if not lines:
        return NotMeasured(" ".join(remarks))
    return Drawn("lines", {"charts": [chart(lines, left, right)]}, tuple(facts), tuple(remarks))
