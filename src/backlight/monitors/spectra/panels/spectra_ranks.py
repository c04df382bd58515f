"""Stable ranks of the layers over steps: of weights, gradients, updates and momenta."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.report.spectra import lines_over_steps

CHARTS = (
    ("stable_rank_gradient", "Gradient (mean of the replicates)"),
    ("stable_rank_weight", "Weight"),
    ("stable_rank_update", "Update"),
    ("stable_rank_momentum", "Momentum"),
)


@panel(
    "spectra_ranks",
    title="Stable ranks over steps",
    order=24,
    series=("spectra/stable_rank",),
    note="The squared Frobenius norm over the squared largest singular value: how many directions share it.",
    monitor="spectra",
)
def spectra_ranks(source: Source) -> Drawn | NotMeasured:
    """Draw the stable ranks of each kind in a chart, one line for each layer."""
    charts, remarks = [], []
    for name, title in CHARTS:
        lines, remark = lines_over_steps(source.spectra, name)
        remarks += remark
        if lines:
            charts.append(chart(lines, Axis("stable rank", low=0.0), title=title))
    if not charts:
        return NotMeasured(source.reason("spectra", otherwise="No stable rank was recorded."))
    return Drawn("lines", {"charts": charts, "small": True}, (), tuple(dict.fromkeys(remarks)))
