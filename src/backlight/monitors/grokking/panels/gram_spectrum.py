"""The spectrum of the gradients' second moment over steps, uncentred and centred."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.geometry import spans, spectrum_lines
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number

PLACES = (1, 2, 3, 5, 10, 20, 50, 100)
"""Eigenvalues that are drawn, counted from the largest."""

OBJECTS = (
    ("gram/model/eigenvalues", "Second moment of the per-sample gradients"),
    ("gram/model/centred_eigenvalues", "Their covariance"),
)


@panel(
    "gram_spectrum",
    title="Spectrum over time",
    order=5,
    series=("arrays/gram", "gram/model/eigenvalues"),
    note="Eigenvalues of the second moment of the per-sample gradients of the probe batch, from their Gram.",
    monitor="grokking",
)
def gram_spectrum(source: Source) -> Drawn | NotMeasured:
    """Draw chosen eigenvalues over steps on a logarithmic axis."""
    charts, facts = [], []
    for name, title in OBJECTS:
        steps, spectra = source.run.array(name, attempt=source.attempt)
        lines = spectrum_lines(steps, spectra, PLACES)
        if lines:
            axis = Axis("eigenvalue", log=True)
            charts.append(chart(lines, axis, title=title, spans=spans(source.learning)))
            facts.append(Fact("eigenvalues stored", number(max(len(s.ravel()) for s in spectra))))
    if not charts:
        reason = source.reason(
            "gram", "gram/model", otherwise="No Gram was recorded: watch(..., samples=(loss_fn, batch))."
        )
        return NotMeasured(reason)
    return Drawn("lines", {"charts": charts}, tuple(facts[:1]))
