"""The scalars that the user logged, each in a chart of its own."""

from __future__ import annotations

from backlight.report.charts import NUMBERS, Axis, Line, chart, spans_decades
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

SHOWN = 40
"""Charts of user scalars on one page."""

CURVES = {"train_accuracy", "test_accuracy", "train_loss", "test_loss"}
"""Scalars that a run on grokking shows as its learning curves."""


@panel("user_scalars", title="Your scalars", order=90, series=("scalars", "user"))
def user_scalars(source: Source) -> Drawn | NotMeasured:
    """Draw each scalar that was given to ``watch.log``."""
    names = [n for n in source.run.scalar_names(source="user") if not _elsewhere(n, source)]
    charts = []
    for name in names[:SHOWN]:
        scalar = source.scalar(name, source="user")
        if not len(scalar.steps):
            continue
        line = Line(visible(name), scalar.steps, scalar.values, tone="first")
        axis = Axis("", log=spans_decades(scalar.values, factor=1000.0))
        numbers = max(1024, 2 * NUMBERS // len(names))
        charts.append(chart([line], axis, title=visible(name), numbers=numbers))
    if not charts:
        return NotMeasured("Nothing was logged with watch.log(name=value).")
    remarks = (
        (f"{len(names)} scalars were logged; the first {SHOWN} are drawn.",) if len(names) > SHOWN else ()
    )
    return Drawn("lines", {"charts": charts, "small": True}, (), remarks)


def _elsewhere(name: str, source: Source) -> bool:
    """Tell whether the panels of the monitor grokking show this scalar."""
    if "grokking" not in source.run.monitors:
        return False
    return name in CURVES or name.startswith("progress/")
