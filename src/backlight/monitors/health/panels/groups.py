"""The gradient of named groups of parameters over steps, and their ratios."""

from __future__ import annotations

import itertools

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number

SHOWN = 8
"""Lines that one chart can tell apart."""


@panel(
    "groups",
    title="Groups",
    order=35,
    series=("groups/rms",),
    note="Root mean square over all measured gradients of a group; groups of any size compare.",
    monitor="health",
)
def groups(source: Source) -> Drawn | NotMeasured:
    """Draw one line per group, and one per pair for the ratio of the first to the second."""
    if not source.groups:
        reason = source.reason("group", otherwise="No group was named: backlight run --group NAME=PATTERN.")
        return NotMeasured(reason)
    lines = [Line(name, steps, values, gaps=True) for name, (steps, values) in source.groups.items()]
    charts = [chart(lines[:SHOWN], Axis("rms (gradient)", log=True))]
    ratios, facts = [], []
    for (one, (steps, first)), (other, (_, second)) in itertools.combinations(source.groups.items(), 2):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.divide(first, second)
        ratios.append(Line(f"{one} / {other}", steps, ratio, gaps=True))
        finite = ratio[np.isfinite(ratio)]
        if finite.size:
            facts.append(Fact(f"median {one} / {other}", number(float(np.median(finite)))))
    if ratios:
        charts.append(chart(ratios[:SHOWN], Axis("ratio", log=True)))
    hidden = max(len(lines), len(ratios)) - SHOWN
    remarks = (f"The first {SHOWN} lines of each chart are drawn.",) if hidden > 0 else ()
    return Drawn("lines", {"charts": charts}, tuple(facts[:4]), remarks)
