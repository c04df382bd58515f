"""Signal and noise of the layers over steps: signal share, noise scale, identifiable directions."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.report.spectra import lines_over_steps

CHARTS = (
    ("signal_share", "Signal share", Axis("share of the squared norm")),
    ("noise_scale", "Noise scale", Axis("samples", log=True)),
    ("identifiable", "Identifiable directions", Axis("directions", low=0.0)),
    ("noise_sigma", "Noise level", Axis("noise of one entry", log=True)),
    ("drift_left", "What stayed of the leading left directions", Axis("mean squared cosine", low=0.0)),
    ("drift_right", "What stayed of the leading right directions", Axis("mean squared cosine", low=0.0)),
)


@panel(
    "spectra_signal",
    title="Signal and noise over steps",
    order=23,
    series=("spectra/signal",),
    note="Where the noise scale is far above the batch, steps are mostly noise; where it is far below, "
    "samples are spent on what is known. A noise scale has a gap where no signal was found; a share below "
    "zero is zero within its error.",
    monitor="spectra",
)
def spectra_signal(source: Source) -> Drawn | NotMeasured:
    """Draw each number of the layers in a chart, one line for each layer."""
    charts, remarks = [], []
    for name, title, axis in CHARTS:
        lines, remark = lines_over_steps(source.spectra, name)
        remarks += remark
        if lines:
            charts.append(chart(lines, axis, title=title))
    if not charts:
        return NotMeasured(source.reason("spectra", otherwise="No spectra were recorded."))
    return Drawn("lines", {"charts": charts, "small": True}, (), tuple(dict.fromkeys(remarks)))
