"""The total gradient norm over steps, against the limit that clipping had."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number


@panel(
    "total_norm",
    title="Total gradient norm",
    order=20,
    series=("scalars/total_norm",),
    note="L2 norm over all parameters, each tensor once, before clipping.",
    monitor="health",
)
def total_norm(source: Source) -> Drawn | NotMeasured:
    """Draw the total norm on a logarithmic axis, with the clip limit where one was in use."""
    norm = source.scalar("total_norm")
    if not len(norm.steps):
        return NotMeasured(source.reason("total_norm", "gradient", otherwise="No gradient was recorded."))
    lines = [Line("total norm", norm.steps, norm.values, tone="first")]
    limit = source.scalar("clip/limit")
    if len(limit.steps):
        lines.append(Line("clip limit", limit.steps, limit.values, style="dashed", tone="limit"))
    facts = []
    finite = np.isfinite(norm.values)
    if finite.any():
        inner = norm.values[finite]
        top = int(np.argmax(np.where(finite, norm.values, -np.inf)))
        facts.append(Fact("median", number(float(np.median(inner)))))
        facts.append(Fact("largest", f"{number(norm.values[top])} at step {number(int(norm.steps[top]))}"))
    if not finite.all():
        facts.append(Fact("not finite", f"{int((~finite).sum()):,} of {len(finite):,} steps"))
    axis = Axis("total norm (gradient)", log=True)
    return Drawn("lines", {"charts": [chart(lines, axis)]}, tuple(facts))
