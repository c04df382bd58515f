"""Progress measures over steps, each with the test accuracy behind it and the control's beside it."""

from __future__ import annotations

from backlight.report.charts import Axis, Line, chart
from backlight.report.geometry import lines_of, measured, scaled, spans
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

SHOWN = 24
"""Charts of progress measures on one page."""


@panel(
    "progress",
    title="Progress measures",
    order=3,
    series=("user/progress", "progress"),
    note="What the papers watch on the way to generalisation, with the test accuracy on the right axis.",
    monitor="grokking",
)
def progress(source: Source) -> Drawn | NotMeasured:
    """Draw each progress measure in a chart of its own."""
    if "grokking" not in source.run.monitors:
        return NotMeasured("The monitor grokking did not watch; what was logged is among your scalars.")
    names = [name for name in source.run.scalar_names("user") if name.startswith("progress/")]
    accuracy = measured(source.run, "test_accuracy", source.attempt, "user")
    charts = []
    for name in names[:SHOWN]:
        title = visible(name.removeprefix("progress/")).replace("_", " ")
        lines = lines_of(source, ((name, title),), "user")
        if not lines:
            continue
        left, right = scaled(lines, title), None
        if accuracy is not None:
            right = Axis("test accuracy", low=0.0, high=1.0)
            behind = Line("test accuracy", accuracy.steps, accuracy.values, axis="right", tone="eighth")
            lines.append(behind)
        charts.append(chart(lines, left, right, title=title, spans=spans(source.learning)))
    if not charts:
        return NotMeasured("No progress measure was logged: watch.log(**{'progress/name': value}).")
    remarks = (f"{len(names)} were logged; the first {SHOWN} are drawn.",) if len(names) > SHOWN else ()
    return Drawn("lines", {"charts": charts}, (), remarks)
