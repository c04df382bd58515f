"""The product over a window of steps: how the gradient's direction moves in time."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.geometry import lines_of, scaled, spans, spectrum_lines
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

PLACES = (1, 2, 3, 5, 10)


@panel(
    "gradient_window",
    title="Window of steps",
    order=12,
    series=("scalars/window", "arrays/window"),
    note="Spectrum of the products of the last gradients with one another, one for each logged step.",
    monitor="grokking",
)
def gradient_window(source: Source) -> Drawn | NotMeasured:
    """Draw the metrics of the window, each in a chart, and its spectrum."""
    marked, charts = spans(source.learning), []
    for name in source.scalar_names("window"):
        title = visible(name.removeprefix("window/")).replace("_", " ")
        lines = lines_of(source, ((name, title),))
        if lines:
            charts.append(chart(lines, scaled(lines, ""), title=title, spans=marked))
    steps, spectra = source.run.array("window/eigenvalues", attempt=source.attempt)
    lines = spectrum_lines(steps, spectra, PLACES)
    if lines:
        charts.append(chart(lines, Axis("eigenvalue", log=True), title="Spectrum", spans=marked))
    if not charts:
        return NotMeasured(source.reason("window", otherwise="No window of gradients was recorded."))
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2})
