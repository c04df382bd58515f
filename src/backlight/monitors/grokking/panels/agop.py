"""The average gradient outer product of the outputs with respect to the input."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.geometry import lines_of, scaled, spans, spectrum_lines
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

PLACES = (1, 2, 3, 5, 10, 20)


@panel(
    "agop",
    title="Input AGOP",
    order=11,
    series=("scalars/agop", "arrays/agop"),
    note="E[JᵀJ] over the probe batch: which directions of the input the net has learnt to look at.",
    monitor="grokking",
)
def agop(source: Source) -> Drawn | NotMeasured:
    """Draw its metrics, each in a chart, and its spectrum."""
    marked, charts = spans(source.learning), []
    for name in source.scalar_names("agop"):
        title = visible(name.removeprefix("agop/")).replace("_", " ")
        lines = lines_of(source, ((name, title),))
        if lines:
            charts.append(chart(lines, scaled(lines, ""), title=title, spans=marked))
    steps, spectra = source.run.array("agop/eigenvalues", attempt=source.attempt)
    lines = spectrum_lines(steps, spectra, PLACES)
    if lines:
        charts.append(chart(lines, Axis("eigenvalue", log=True), title="Spectrum", spans=marked))
    if not charts:
        reason = source.reason("agop", otherwise="No input AGOP was recorded: token ids have none.")
        return NotMeasured(reason)
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2})
