"""Panels of grokking: learning curves and verdict, second moment of per-sample gradients, outer products."""

from __future__ import annotations

from backlight.monitors.grokking.panels.learning import (
    analysis_of,
    between,
    lines_of,
    measured,
    metric_panel,
    scaled,
    spans,
    spectrum_lines,
    summary,
    verdict_of,
)
from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import listed, number, visible

ACCURACIES = (("train_accuracy", "training accuracy"), ("test_accuracy", "test accuracy"))
LOSSES = (("train_loss", "training loss"), ("test_loss", "test loss"))

MAX_PROGRESS_CHARTS = 24
"""Charts of progress measures on one page."""

_HELD = {True: "holds", False: "fails", None: "unknown"}
_NOT_WATCHED = "The grokking monitor was not active; logged values are listed under your scalars."


@panel(
    "learning_curves",
    title="Learning curves",
    order=1,
    series=("user/train_accuracy", "user/test_accuracy", "user/train_loss", "user/test_loss"),
    note="Each time lies between two logs: after the first of them, at the second at the latest.",
    monitor="grokking",
    summary=summary,
)
def learning_curves(source: Source) -> Drawn | NotMeasured:
    """Draw accuracies and losses; dashed lines are the control's."""
    if "grokking" not in source.run.monitors:
        return NotMeasured(_NOT_WATCHED)
    learning, marked = analysis_of(source), spans(source, named=True)
    accuracies, losses = lines_of(source, ACCURACIES, "user"), lines_of(source, LOSSES, "user")
    charts = []
    if accuracies:
        axis = Axis("share of samples", low=0.0, high=1.0)
        charts.append(chart(accuracies, axis, title="Accuracy", spans=marked))
    if losses:
        charts.append(chart(losses, scaled(losses, "loss"), title="Loss", spans=marked))
    if not charts:
        return NotMeasured("No accuracy was logged: watch.log(train_accuracy=..., test_accuracy=...).")
    if learning is None:
        return Drawn("lines", {"charts": charts}, (), ("There is no verdict: see the findings.",))
    detection = learning.detection
    facts = [Fact("verdict", verdict_of(detection))]
    facts += [Fact("memorised in steps", between(detection.memorised))]
    facts += [Fact("generalised in steps", between(detection.generalised))]
    remarks = []
    if learning.changes:
        shown = listed([number(step) for step in learning.changes], 6)
        remarks.append(f"The test accuracy changes its level at step {shown} (change points).")
    if learning.control is not None:
        remarks.append(
            f"Dashed: the control {visible(learning.control.path.name)}, the same with random labels."
        )
    elif not learning.facts.control:
        remarks.append("No matched control was found next to this run.")
    return Drawn("lines", {"charts": charts}, tuple(facts), tuple(remarks))


@panel(
    "grokking",
    title="Verdict on grokking",
    order=2,
    series=("grokking", "events/grokking"),
    monitor="grokking",
)
def grokking(source: Source) -> Drawn | NotMeasured:
    """List the conditions, the sweep and the verdict on the control."""
    learning = analysis_of(source)
    if learning is None:
        return NotMeasured(
            "The verdict needs train_accuracy and test_accuracy as shares of samples; none were logged."
        )
    detection, theirs = learning.detection, learning.control_detection
    rows = [("verdict", f"{verdict_of(detection)}. {detection.claim}")]
    rows += [
        (row.name, f"{_HELD[row.held]}: {row.got}, expected {row.expected}") for row in detection.conditions
    ]
    facts = []
    if detection.sweep:
        lines = f"{sum(point.grokking for point in detection.sweep)} of {len(detection.sweep)}"
        rows.append(("sweep", f"grokking at {lines} lines, training accuracy and way to the plateau"))
        facts.append(Fact("lines of the sweep", lines))
    if theirs is not None:
        rows.append(("control", f"{verdict_of(theirs)}. {theirs.claim}"))
    elif learning.facts.control:
        rows.append(("control", "This run is a control itself: its labels are random."))
    else:
        rows.append(
            ("control", "None was found, so no measure of this run can be called a signal of grokking.")
        )
    remarks = tuple(f"{visible(note)}." for note in detection.notes)
    return Drawn("table", {"rows": [(k, visible(v)) for k, v in rows], "tree": []}, tuple(facts), remarks)


@panel(
    "progress",
    title="Progress measures",
    order=3,
    series=("user/progress", "progress"),
    note="Progress measures of the papers; the test accuracy is on the right axis.",
    monitor="grokking",
)
def progress(source: Source) -> Drawn | NotMeasured:
    """Draw each progress measure in a chart of its own."""
    if "grokking" not in source.run.monitors:
        return NotMeasured(_NOT_WATCHED)
    names = [name for name in source.run.scalar_names("user") if name.startswith("progress/")]
    accuracy = measured(source.run, "test_accuracy", "user")
    charts = []
    for name in names[:MAX_PROGRESS_CHARTS]:
        title = visible(name.removeprefix("progress/")).replace("_", " ")
        lines = lines_of(source, ((name, title),), "user")
        if not lines:
            continue
        left, right = scaled(lines, title), None
        if accuracy is not None:
            right = Axis("test accuracy", low=0.0, high=1.0)
            behind = Line("test accuracy", accuracy.steps, accuracy.values, axis="right", tone="eighth")
            lines.append(behind)
        charts.append(chart(lines, left, right, title=title, spans=spans(source)))
    if not charts:
        return NotMeasured("No progress measure was logged: watch.log(**{'progress/name': value}).")
    remarks = (
        (f"{len(names)} measures were logged; the first {MAX_PROGRESS_CHARTS} are drawn.",)
        if len(names) > MAX_PROGRESS_CHARTS
        else ()
    )
    return Drawn("lines", {"charts": charts}, (), remarks)


@panel(
    "correlations",
    title="Correlation with the test accuracy",
    order=4,
    series=("correlations",),
    note="Rank correlation of each measure with the test accuracy after memorisation, at the lead (+) or lag "
    "(-) where it is strongest. Any long fall correlates with any long rise: only a measure that the control "
    "does not follow can signal generalisation. Leads are in steps; ends are medians of the last tenth.",
    monitor="grokking",
)
def correlations(source: Source) -> Drawn | NotMeasured:
    """List the measures, the strongest first, with the control's numbers next to them."""
    learning = analysis_of(source)
    if learning is None or not learning.following:
        return NotMeasured("No measure was recorded at steps with a test accuracy.")
    rows = [
        [
            visible(row.measure.removeprefix("gram/model/").removeprefix("progress/")),
            _signed(row.correlation),
            f"{row.lead_steps:+,}" if row.lead_logs and row.lead_steps else "0",
            _signed(row.control),
            *("" if level is None else number(level, 3) for level in row.levels),
            visible(row.conclusion),
        ]
        for row in learning.following
    ]
    heads = ("measure", "correlation", "lead", "control", "end", "control ends", "")
    data = {"name": "Correlations", "heads": heads, "figures": (1, 2, 3, 4, 5), "rows": rows}
    remarks = () if learning.control is not None else ("Without a matched control no conclusion is drawn.",)
    return Drawn("listing", data, (), remarks)


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


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
        steps, spectra = source.run.array(name)
        lines = spectrum_lines(steps, spectra, RANKS)
        if lines:
            axis = Axis("eigenvalue", log=True)
            charts.append(chart(lines, axis, title=title, spans=spans(source)))
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
        scalar = measured(source.run, name)
        if scalar is not None and len(lines) < MAX_MATRICES:
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
    if matrices > MAX_MATRICES:
        remarks = (f"{matrices} matrices were measured; the first {MAX_MATRICES} are drawn.",)
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
    steps, spectra = source.run.array(f"{name}/eigenvalues")
    lines = spectrum_lines(steps, spectra, ranks)
    if lines:
        charts.append(chart(lines, Axis("eigenvalue", log=True), title="Spectrum", spans=marked))
    if not charts:
        return NotMeasured(source.reason(name, otherwise=otherwise))
    return Drawn("lines", {"charts": charts, "small": len(charts) > 2})
