"""Panels of grokking on gradients: the second moment of per-sample gradients, and outer products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.grokking.panels.learning_curves import analysis_of, lines_of, measured, scaled, spans
from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, NotMeasured, PanelFact, panel
from backlight.report.source import Source
from backlight.store.read.run import Run
from backlight.text import number, visible

NO_GRAM = "No Gram was recorded: watch(..., samples=(loss_fn, batch))."

SCOPES = 8
"""Lines of single layers or matrices that one chart can tell apart."""

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
    charts, facts, marked = [], [], spans(source)
    for name, title in SPECTRA:
        steps, spectra = source.array(name)
        lines = spectrum_lines(steps, spectra, RANKS)
        if lines:
            axis = Axis("eigenvalue", log=True)
            charts.append(chart(lines, axis, title=title, spans=marked))
            facts.append(PanelFact("eigenvalues stored", number(max(len(s.ravel()) for s in spectra))))
    if not charts:
        reason = source.reason("gram", "gram/model", otherwise=NO_GRAM)
        return NotMeasured(reason)
    return Drawn("lines", {"charts": charts}, tuple(facts[:1]))


SECOND_MOMENT = (
    ("Trace", "trace", (("model/trace", "trace"), ("model/centred/trace", "trace, centred"))),
    ("Norms", "norm", tuple((f"model/{name}", name) for name in ("spectral", "frobenius", "nuclear"))),
    (
        "Effective rank",
        "directions",
        (
            ("model/effective_rank", "effective rank"),
            ("model/participation_ratio", "participation ratio"),
            ("model/centred/effective_rank", "effective rank, centred"),
        ),
    ),
    # A chart of its own: it is far above the others.
    ("Numerical rank", "directions", (("model/numerical_rank", "numerical rank"),)),
    ("Coherence", "share", (("model/coherence", "coherence"),)),
    (
        "Noise scale",
        "samples",
        (
            ("model/noise_scale", "noise scale"),
            ("model/noise_scale_low", "95 %, low"),
            ("model/noise_scale_high", "95 %, high"),
        ),
    ),
)
"""Charts: title, label of the axis, scalars below ``gram/`` with their labels."""

BY_LAYER = ("trace", "effective_rank", "coherence")
"""Metrics that are also drawn layer by layer."""


@panel(
    "second_moment",
    title="Second moment of the per-sample gradients",
    order=6,
    series=("scalars/gradient", "scalars/gram"),
    note="Trace: mean squared norm of a per-sample gradient; centred, of its distance from the mean. "
    "Effective rank: exponential of the entropy of the spectrum, at most the number of samples. Coherence: "
    "squared norm of the mean gradient over the mean squared norm, 1 where all samples agree and 1/N where "
    "they are orthogonal. The noise scale is the batch at which signal and noise balance.",
    monitor="grokking",
)
def second_moment(source: Source) -> Drawn | NotMeasured:
    """Draw the gradient's norm, the metrics of the second moment, and some of them by layer."""
    marked = spans(source)
    groups = [("Gradient", "norm", lines_of(source, (("gradient/norm", "gradient norm"),)))]
    groups += [
        (title, label, lines_of(source, [(f"gram/{name}", words) for name, words in metrics]))
        for title, label, metrics in SECOND_MOMENT
    ]
    remarks: list[str] = []
    for metric in BY_LAYER:
        words = metric.replace("_", " ")
        names = scopes(source.run, metric)
        scalars = [(scope, measured(source.run, name)) for scope, name in list(names.items())[:SCOPES]]
        single = [Line(visible(scope), s.steps, s.values) for scope, s in scalars if s is not None]
        groups.append((f"{words.capitalize()} by layer", words, single))
        if len(names) > SCOPES and not remarks:
            remarks.append(f"{len(names)} layers were measured; the first {SCOPES} are drawn.")
    charts = [
        chart(lines, scaled(lines, label), title=title, spans=marked)
        for title, label, lines in groups
        if lines
    ]
    if not charts:
        return NotMeasured(source.reason("gradient", "gram", "gram/model", otherwise=NO_GRAM))
    learning = analysis_of(source)
    if learning is not None and learning.control is None and not learning.facts.control:
        remarks.append("No matched control was found next to this run.")
    trace = measured(source.run, "gram/model/trace")
    facts = (
        [PanelFact("trace, first to last", f"{number(trace.values[0])} to {number(trace.values[-1])}")]
        if trace
        else []
    )
    return Drawn("lines", {"charts": charts, "small": True}, tuple(facts), tuple(remarks))


def scopes(run: Run, metric: str) -> dict[str, str]:
    """Return scalar names of ``metric`` for single blocks, else layers, by what the scope is called."""
    for kind in ("block", "layer"):
        head = f"gram/{kind}/"
        names = {
            name.removeprefix(head).removesuffix(f"/{metric}"): name
            for name in run.scalar_names("backlight")
            if name.startswith(head) and name.endswith(f"/{metric}") and "/centred/" not in name
        }
        if len(names) > (1 if kind == "block" else 0):  # of one block its layers tell more
            return names
    return {}


AGOP_RANKS = (1, 2, 3, 5, 10, 20)
WINDOW_RANKS = (1, 2, 3, 5, 10)
"""Eigenvalues that are drawn, counted from the largest."""

MATRIX_METRICS = ("trace", "spectral", "effective_rank", "participation_ratio", "numerical_rank", "condition")
"""Metrics of matrix products that are drawn, each in its own chart; all are in the run."""


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
        scalar = measured(source.run, name)
        if scalar is not None and len(lines) < SCOPES:
            lines.append(Line(visible(parameter), scalar.steps, scalar.values))
    charts = [
        chart(lines, scaled(lines, ""), title=visible(metric).replace("_", " "), spans=spans(source))
        for metric, lines in by_metric.items()
        if lines
    ]
    if not charts:
        reason = source.reason("product", otherwise="No product of a matrix gradient was recorded.")
        return NotMeasured(reason)
    matrices = len({name.rpartition("/")[0] for name in names})
    remarks: tuple[str, ...] = ()
    if matrices > SCOPES:
        remarks = (f"{matrices} matrices were measured; the first {SCOPES} are drawn.",)
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2}, (), remarks)


def _metrics_and_spectrum(
    source: Source, name: str, ranks: tuple[int, ...], otherwise: str
) -> Drawn | NotMeasured:
    marked, charts = spans(source), []
    for metric in source.scalar_names(name):
        title = visible(metric.removeprefix(f"{name}/")).replace("_", " ")
        lines = lines_of(source, ((metric, title),))
        if lines:
            charts.append(chart(lines, scaled(lines, ""), title=title, spans=marked))
    steps, spectra = source.array(f"{name}/eigenvalues")
    lines = spectrum_lines(steps, spectra, ranks)
    if lines:
        charts.append(chart(lines, Axis("eigenvalue", log=True), title="Spectrum", spans=marked))
    if not charts:
        return NotMeasured(source.reason(name, otherwise=otherwise))
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2})


def spectrum_lines(
    steps: NDArray[np.int64], spectra: Sequence[NDArray[Any]], shown: Sequence[int]
) -> list[Line]:
    """Return one line for each of the ``shown`` places (from 1) of the spectra, largest first."""
    lines = []
    for place in shown:
        has = [
            (step, np.sort(s.ravel())[::-1][place - 1])
            for step, s in zip(steps, spectra, strict=True)
            if s.size >= place
        ]
        if has:
            at, values = zip(*has, strict=True)
            lines.append(Line(f"eigenvalue {place}", np.array(at, np.int64), np.array(values, np.float64)))
    return lines
