"""Whether the samples pull in one direction."""

from __future__ import annotations

from backlight.report.geometry import metric_panel
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source


@panel(
    "coherence",
    title="Coherence",
    order=9,
    series=("scalars/gram/model/coherence", "scalars/gram/model/noise_scale"),
    note="Squared norm of the mean gradient over the mean squared norm: 1 where all samples agree, 1/N where "
    "they are orthogonal. The noise scale is the batch at which signal and noise balance.",
    monitor="grokking",
)
def coherence(source: Source) -> Drawn | NotMeasured:
    """Draw coherence and noise scale of the whole model, and the coherence of each layer."""
    return metric_panel(
        source,
        [
            ("Coherence", "share", (("gram/model/coherence", "coherence"),)),
            ("Noise scale", "samples", (("gram/model/noise_scale", "noise scale"),)),
        ],
        by_scope=("coherence", "coherence"),
        otherwise="No Gram was recorded: watch(..., samples=(loss_fn, batch)).",
    )
