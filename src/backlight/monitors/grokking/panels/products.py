"""Outer products: of the outputs by the input, over a window of steps, and of single matrices."""

from __future__ import annotations

from backlight.report.charts import Axis, Line, chart
from backlight.report.geometry import lines_of, measured, scaled, spans, spectrum_lines
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

AGOP_RANKS = (1, 2, 3, 5, 10, 20)
WINDOW_RANKS = (1, 2, 3, 5, 10)
"""Eigenvalues that are drawn, counted from the largest."""

MATRIX_METRICS = ("trace", "spectral", "effective_rank", "participation_ratio", "numerical_rank", "condition")
"""Metrics of matrix products that are drawn, each in its own chart; all are in the run."""

MAX_MATRICES = 8
"""Matrices that one chart can tell apart."""


@panel(
    "agop",
    title="Input AGOP",
    order=11,
    series=("scalars/agop", "arrays/agop"),
    note="E[JᵀJ] over the probe batch: the input directions to which the outputs are sensitive.",
    monitor="grokking",
)
def agop(source: Source) -> Drawn | NotMeasured:
    """Draw its metrics, each in a chart, and its spectrum."""
    return _metrics_and_spectrum(
        source, "agop", AGOP_RANKS, "No input AGOP was recorded: token ids have none."
    )


@panel(
    "gradient_window",
    title="Window of steps",
    order=12,
    series=("scalars/window", "arrays/window"),
    note="Spectrum of the inner products of the last gradients, one for each logged step.",
    monitor="grokking",
)
def gradient_window(source: Source) -> Drawn | NotMeasured:
    """Draw the metrics of the window, each in a chart, and its spectrum."""
    return _metrics_and_spectrum(source, "window", WINDOW_RANKS, "No window of gradients was recorded.")


@panel(
    "matrix_products",
    title="Products of matrix gradients",
    order=13,
    series=("scalars/product", "arrays/product"),
    note="G Gᵀ of the gradient of one weight matrix: its eigenvalues are the squared singular values.",
    monitor="grokking",
)
def matrix_products(source: Source) -> Drawn | NotMeasured:
    """Draw each metric in a chart, one line for each matrix."""
    by_metric: dict[str, list[Line]] = {metric: [] for metric in MATRIX_METRICS}
    names = source.scalar_names("product")
    for name in names:
        parameter, _, metric = name.removeprefix("product/").rpartition("/")
        if metric not in by_metric:
            continue
        lines = by_metric[metric]
        scalar = measured(source.run, name, source.attempt)
        if scalar is not None and len(lines) < MAX_MATRICES:
            lines.append(Line(visible(parameter), scalar.steps, scalar.values))
    charts = [
        chart(lines, scaled(lines, ""), title=visible(metric).replace("_", " "), spans=spans(source.learning))
        for metric, lines in by_metric.items()
        if lines
    ]
    if not charts:
        reason = source.reason("product", otherwise="No product of a matrix gradient was recorded.")
        return NotMeasured(reason)
    matrices = len({name.rpartition("/")[0] for name in names})
    remarks: tuple[str, ...] = ()
    if matrices > MAX_MATRICES:
        remarks = (f"{matrices} matrices were measured; the first {MAX_MATRICES} are drawn.",)
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2}, (), remarks)


def _metrics_and_spectrum(
    source: Source, name: str, ranks: tuple[int, ...], otherwise: str
) -> Drawn | NotMeasured:
    marked, charts = spans(source.learning), []
    for metric in source.scalar_names(name):
        title = visible(metric.removeprefix(f"{name}/")).replace("_", " ")
        lines = lines_of(source, ((metric, title),))
        if lines:
            charts.append(chart(lines, scaled(lines, ""), title=title, spans=marked))
    steps, spectra = source.run.array(f"{name}/eigenvalues", attempt=source.attempt)
    lines = spectrum_lines(steps, spectra, ranks)
    if lines:
        charts.append(chart(lines, Axis("eigenvalue", log=True), title="Spectrum", spans=marked))
    if not charts:
        return NotMeasured(source.reason(name, otherwise=otherwise))
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2})
