"""Where the time of a step went, phase by phase."""

from __future__ import annotations

from typing import Any

import numpy as np

from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.reduction import cut
from backlight.report.source import Source
from backlight.report.text import duration, percent, visible

RANGES = 1500
"""Ranges of steps in the stacked chart; a stack of means adds up, a stack of maxima would not."""


@panel(
    "phases",
    title="Time per step",
    order=100,
    series=("scalars/phase", "scalars/time"),
    note="Time of each phase of a step, stacked.",
    room="steptime",
)
def phases(source: Source) -> Drawn | NotMeasured:
    """Draw the phases as a stack of means per range of steps, and the slowest step of each range."""
    recorded = {name: source.scalar(name) for name in source.scalar_names("phase")}
    recorded = {name: scalar for name, scalar in recorded.items() if len(scalar.steps)}
    if not recorded:
        return NotMeasured(source.reason("phase", "steptime", otherwise="The room steptime was not on."))
    steps = np.unique(np.concatenate([scalar.steps for scalar in recorded.values()]))
    seconds = np.zeros((len(recorded), len(steps)))
    for row, scalar in enumerate(recorded.values()):
        seconds[row, np.searchsorted(steps, scalar.steps)] = np.nan_to_num(scalar.values, posinf=0, neginf=0)
    total = seconds.sum(axis=0)
    order = np.argsort(-seconds.sum(axis=1))
    buckets = cut(steps, RANGES)
    starts = buckets.offsets(steps)[1]
    names = list(recorded)
    table: list[dict[str, Any]] = [
        {
            "label": visible(names[row].removeprefix("phase/")).replace("_", " "),
            "seconds": np.add.reduceat(seconds[row], starts) / buckets.recorded,
            "median": duration(float(np.median(seconds[row]))),
            "p95": duration(float(np.quantile(seconds[row], 0.95))),
            "share": percent(float(seconds[row].sum() / total.sum())) if total.sum() else "not measured",
        }
        for row in order
    ]
    facts = (
        Fact("median step", duration(float(np.median(total)))),
        Fact("95th percentile", duration(float(np.quantile(total, 0.95)))),
        Fact("first step", duration(float(total[0]))),
    )
    data = {
        "steps": buckets.first,
        "exact": buckets.exact,
        "phases": table,
        "usual": float(np.quantile(total, 0.95)),
        "slowest": np.maximum.reduceat(total, starts),
    }
    remarks = (
        ()
        if buckets.exact
        else ("The stack shows means over ranges of steps; the line the slowest step in each.",)
    )
    return Drawn("stack", data, facts, remarks)
