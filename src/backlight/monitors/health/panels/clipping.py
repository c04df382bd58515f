"""What clipping saw, and what it did."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import count, number, percent


@panel(
    "clipping",
    title="Clipping",
    order=60,
    series=("scalars/clip", "events/clip_by_hand", "events/clip_by_value"),
    note="The total norm that clipping saw, its limit, and the factor that it applied.",
    monitor="health",
)
def clipping(source: Source) -> Drawn | NotMeasured:
    """Draw norm, limit and factor of clipping, and say how often it was active."""
    norm, limit, factor = (source.scalar(f"clip/{name}") for name in ("norm", "limit", "factor"))
    by_hand = len(source.run.events("clip_by_hand"))
    remarks = (
        (f"Gradients were changed by hand between backward and step {by_hand:,} times.",) if by_hand else ()
    )
    if not len(norm.steps) and not len(factor.steps):
        nothing = source.reason("clip", otherwise="No clipping was seen in this run.")
        return NotMeasured(" ".join((nothing, *remarks)))
    charts = []
    if len(norm.steps):
        lines = [Line("norm before clipping", norm.steps, norm.values, tone="first")]
        if len(limit.steps):
            lines.append(Line("limit", limit.steps, limit.values, style="dashed", tone="limit"))
        charts.append(chart(lines, Axis("norm (gradient)", log=True), title="Norm and limit"))
    facts = []
    if len(factor.steps):
        active = int(np.count_nonzero(factor.values < 1))
        share = percent(active / len(factor.values))
        facts.append(Fact("active", f"{share} ({active:,} of {count(len(factor.values), 'step')})"))
        if np.isfinite(factor.values).any():
            facts.append(Fact("strongest factor", number(float(np.nanmin(factor.values)))))
        line = Line("factor", factor.steps, factor.values, tone="second")
        charts.append(chart([line], Axis("factor", low=0.0, high=1.0), title="Factor applied"))
    return Drawn("lines", {"charts": charts}, tuple(facts), remarks)
