"""The trace of the gradients' second moment and covariance: how much gradient, and how much noise."""

from __future__ import annotations

from backlight.report.geometry import metric_panel
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source


@panel(
    "gram_trace",
    title="Trace",
    order=6,
    series=("scalars/gram/model/trace", "scalars/gram"),
    note="Mean squared norm of a per-sample gradient; centred, of its distance from the mean gradient.",
    monitor="grokking",
)
def gram_trace(source: Source) -> Drawn | NotMeasured:
    """Draw the traces of the whole model, and that of each layer."""
    metrics = (("gram/model/trace", "trace"), ("gram/model/centred/trace", "trace, centred"))
    return metric_panel(
        source,
        [("Whole model", "trace", metrics)],
        by_scope=("trace", "trace"),
        otherwise="No Gram was recorded: watch(..., samples=(loss_fn, batch)).",
        facts=(("gram/model/trace", "trace, first to last"),),
    )
