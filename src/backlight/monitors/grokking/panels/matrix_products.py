"""The products G Gᵀ of the gradients of single matrices."""

from __future__ import annotations

from backlight.report.charts import Line, chart
from backlight.report.geometry import measured, scaled, spans
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

METRICS = ("trace", "spectral", "effective_rank", "participation_ratio", "numerical_rank", "condition")
"""Metrics that are drawn, each in a chart of its own; all are in the run."""

SHOWN = 8
"""Matrices that one chart can tell apart."""


@panel(
    "matrix_products",
    title="Products of matrix gradients",
    order=13,
    series=("scalars/product", "arrays/product"),
    note="G Gᵀ of the gradient of one weight matrix: its spectrum is that of the singular values, squared.",
    monitor="grokking",
)
def matrix_products(source: Source) -> Drawn | NotMeasured:
    """Draw each metric in a chart, one line for each matrix."""
    by_metric: dict[str, list[Line]] = {metric: [] for metric in METRICS}
    names = source.scalar_names("product")
    for name in names:
        parameter, _, metric = name.removeprefix("product/").rpartition("/")
        if metric not in by_metric:
            continue
        lines = by_metric[metric]
        scalar = measured(source.run, name, source.attempt)
        if scalar is not None and len(lines) < SHOWN:
            lines.append(Line(visible(parameter), scalar.steps, scalar.values))
    charts = [
        chart(lines, scaled(lines, ""), title=visible(metric).replace("_", " "), spans=spans(source.learning))
        for metric, lines in by_metric.items()
        if lines
    ]
    if not charts:
        return NotMeasured(
            source.reason("product", otherwise="No product of a matrix gradient was recorded.")
        )
    matrices = len({name.rpartition("/")[0] for name in names})
    remarks = (
        (f"{matrices} matrices were measured; the first {SHOWN} are drawn.",) if matrices > SHOWN else ()
    )
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2}, (), remarks)
