"""The second moment of the per-sample gradients: spectrum, trace, norms, effective rank, coherence."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.geometry import metric_panel, spans, spectrum_lines
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number

NO_GRAM = "No Gram was recorded: watch(..., samples=(loss_fn, batch))."

RANKS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Eigenvalues that are drawn, counted from the largest."""

SPECTRA = (
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
    """Draw eigenvalues of chosen ranks over steps on a logarithmic axis."""
    charts, facts = [], []
    for name, title in SPECTRA:
        steps, spectra = source.run.array(name, attempt=source.attempt)
        lines = spectrum_lines(steps, spectra, RANKS)
        if lines:
            axis = Axis("eigenvalue", log=True)
            charts.append(chart(lines, axis, title=title, spans=spans(source.learning)))
            facts.append(Fact("eigenvalues stored", number(max(len(s.ravel()) for s in spectra))))
    if not charts:
        reason = source.reason("gram", "gram/model", otherwise=NO_GRAM)
        return NotMeasured(reason)
    return Drawn("lines", {"charts": charts}, tuple(facts[:1]))


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
        otherwise=NO_GRAM,
        facts=(("gram/model/trace", "trace, first to last"),),
    )


@panel(
    "gram_norms",
    title="Norms",
    order=7,
    series=("scalars/gradient", "scalars/gram/model/frobenius", "scalars/gram/model/spectral"),
    note="The norm of the training gradient is that of its rank-one product as well; the others are of the "
    "second moment over samples.",
    monitor="grokking",
)
def gram_norms(source: Source) -> Drawn | NotMeasured:
    """Draw the gradient's norm, and the norms of the second moment."""
    moment = tuple((f"gram/model/{name}", name) for name in ("spectral", "frobenius", "nuclear"))
    return metric_panel(
        source,
        [
            ("Gradient", "norm", (("gradient/norm", "gradient norm"),)),
            ("Second moment", "norm", moment),
        ],
        by_scope=("frobenius", "Frobenius norm"),
        otherwise="No norm was recorded.",
        subjects=("gradient", "gram", "gram/model"),
    )


@panel(
    "effective_rank",
    title="Effective rank",
    order=8,
    series=(
        "scalars/gram/model/effective_rank",
        "scalars/gram/model/participation_ratio",
        "scalars/gram/model/numerical_rank",
    ),
    note="Exponential of the entropy of the spectrum, and its participation ratio; at most the number of "
    "samples in the probe batch.",
    monitor="grokking",
)
def effective_rank(source: Source) -> Drawn | NotMeasured:
    """Draw both counts of directions, centred as well, and that of each layer."""
    ranks = (
        ("gram/model/effective_rank", "effective rank"),
        ("gram/model/participation_ratio", "participation ratio"),
        ("gram/model/centred/effective_rank", "effective rank, centred"),
    )
    numerical = (("gram/model/numerical_rank", "numerical rank"),)
    return metric_panel(
        source,
        [("Whole model", "directions", ranks), ("Numerical rank", "directions", numerical)],
        by_scope=("effective_rank", "effective rank"),
        otherwise=NO_GRAM,
    )


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
        otherwise=NO_GRAM,
    )
