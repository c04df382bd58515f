"""The loss scale of mixed precision, and the steps that it cost."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import count, number, percent


@panel(
    "scaler",
    title="Loss scale",
    order=70,
    series=("scalars/scaler", "events/scaler_skip"),
    note="Scale by which the loss was multiplied; all gradients on this page are divided by it.",
    monitor="health",
)
def scaler(source: Source) -> Drawn | NotMeasured:
    """Draw the scale with the skipped steps marked."""
    scale, skipped = source.scalar("scaler/scale"), source.scalar("scaler/skipped")
    if not len(scale.steps):
        return NotMeasured(source.reason("scaler", otherwise="No gradient scaler was seen in this run."))
    at = skipped.steps[skipped.values > 0]
    facts = [Fact("scale, first to last", f"{number(scale.values[0])} to {number(scale.values[-1])}")]
    if len(skipped.steps):
        share = percent(len(at) / len(skipped.steps))
        facts.append(Fact("skipped", f"{share} ({len(at):,} of {count(len(skipped.steps), 'step')})"))
    lines = [Line("scale", scale.steps, scale.values, style="steps", tone="first")]
    axis = Axis("loss scale", log=bool(np.all(scale.values > 0)), base=2)
    drawn = chart(lines, axis, marks={"skipped step": at})
    return Drawn("lines", {"charts": [drawn]}, tuple(facts))
