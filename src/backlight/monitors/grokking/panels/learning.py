"""What the run learned: accuracies and losses, the verdict on grokking, progress measures, correlations."""

from __future__ import annotations

from backlight.report.charts import Axis, Line, chart
from backlight.report.geometry import between, lines_of, measured, scaled, spans
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
)
def learning_curves(source: Source) -> Drawn | NotMeasured:
    """Draw accuracies and losses; dashed lines are the control's."""
    if "grokking" not in source.run.monitors:
        return NotMeasured(_NOT_WATCHED)
    learning, marked = source.learning, spans(source.learning, named=True)
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
    facts = [Fact("verdict", learning.verdict)]
    facts += [Fact("memorised in steps", between(learning.memorised))]
    facts += [Fact("generalised in steps", between(learning.generalised))]
    remarks = []
    if learning.changes:
        shown = listed([number(step) for step in learning.changes], 6)
        remarks.append(f"The test accuracy changes its level at step {shown} (change points).")
    if learning.control is not None:
        remarks.append(
            f"Dashed: the control {visible(learning.control.path.name)}, the same with random labels."
        )
    elif not learning.is_control:
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
    learning = source.learning
    if learning is None:
        return NotMeasured(
            "The verdict needs train_accuracy and test_accuracy as shares of samples; none were logged."
        )
    rows = [("verdict", f"{learning.verdict}. {learning.claim}")]
    rows += [
        (row.name, f"{_HELD[row.held]}: {row.got}, expected {row.expected}") for row in learning.conditions
    ]
    facts = []
    if learning.swept is not None:
        held, whole = learning.swept
        rows.append(
            ("sweep", f"grokking at {held} of {whole} lines, training accuracy and way to the plateau")
        )
        facts.append(Fact("lines of the sweep", f"{held} of {whole}"))
    if learning.control is not None:
        rows.append(("control", f"{learning.control_verdict}. {learning.control_claim}"))
    elif learning.is_control:
        rows.append(("control", "This run is a control itself: its labels are random."))
    else:
        rows.append(
            ("control", "None was found, so no measure of this run can be called a signal of grokking.")
        )
    remarks = tuple(f"{visible(note)}." for note in learning.notes)
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
    accuracy = measured(source.run, "test_accuracy", source.attempt, "user")
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
        charts.append(chart(lines, left, right, title=title, spans=spans(source.learning)))
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
    learning = source.learning
    if learning is None or not learning.following:
        return NotMeasured("No measure was recorded at steps with a test accuracy.")
    rows = [
        [
            visible(row.measure.removeprefix("gram/model/").removeprefix("progress/")),
            _signed(row.correlation),
            f"{row.lead:+,}" if row.lead else "0",
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
