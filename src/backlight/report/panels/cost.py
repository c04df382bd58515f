"""What watching itself cost."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import duration, percent


@panel(
    "cost",
    title="Cost of watching",
    order=110,
    series=("scalars/cost", "events/cadence"),
    note="Host time that backlight spent inside each step.",
)
def cost(source: Source) -> Drawn | NotMeasured:
    """Draw backlight's own time per step, and its share of the time between steps where that is known."""
    spent, clock = source.scalar("cost"), source.scalar("time")
    if not len(spent.steps):
        return NotMeasured(source.reason("cost", otherwise="The session did not record its own time."))
    facts = [Fact("median per step", duration(float(np.nanmedian(spent.values))))]
    if len(clock.steps) > 1 and (elapsed := float(clock.values[-1] - clock.values[0])) > 0:
        within = (spent.steps > clock.steps[0]) & (spent.steps <= clock.steps[-1])
        facts.append(Fact("share of the run", percent(float(np.nansum(spent.values[within])) / elapsed)))
    line = Line("cost", spent.steps, 1e3 * spent.values, tone="second")
    return Drawn("lines", {"charts": [chart([line], Axis("cost (ms)", low=0.0))]}, tuple(facts))
