"""Panels of grokking on learning: accuracies, verdict, progress measures and what correlates with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backlight.monitors.grokking.model.analysis import GrokkingAnalysis, analyse_if_possible, following_table
from backlight.monitors.grokking.model.curves import StepInterval
from backlight.report.charts import Axis, Line, Span, chart, spans_decades
from backlight.report.panel import Drawn, Figures, MonitorSummary, NotMeasured, PanelFact, panel, tabular
from backlight.report.source import Source
from backlight.store.read.run import Run, Scalar
from backlight.text import count, listed, number, visible

GEOMETRY = ("gram/", "window/", "agop/", "product/", "gradient/")
"""Beginnings of the scalars that describe the geometry of gradients."""

TONES = ("first", "fourth", "third", "fifth", "second", "sixth")
"""Tones of the metrics of one chart; a control has that of its metric, dashed."""


ACCURACIES = (("train_accuracy", "training accuracy"), ("test_accuracy", "test accuracy"))
LOSSES = (("train_loss", "training loss"), ("test_loss", "test loss"))

MAX_PROGRESS_CHARTS = 24
"""Charts of progress measures on one page."""

_HELD = {True: "holds", False: "fails", None: "unknown"}
_NOT_WATCHED = "The grokking monitor was not active; logged values are listed under your scalars."


def _analysis(source: Source) -> GrokkingAnalysis | None:
    return analyse_if_possible(source.run) if "grokking" in source.run.monitors else None


def analysis_of(source: Source) -> GrokkingAnalysis | None:
    """Return the verdict on the run with its control; None where there is none."""
    return source.once(_analysis)


def spans(source: Source, *, named: bool = False) -> tuple[Span, ...]:
    """Return the two times as stretches of a chart, ``named`` in its legend as well."""
    analysis = analysis_of(source)
    if analysis is None:
        return ()
    times = (
        ("memorised", "t_m", analysis.detection.memorised, "second"),
        ("generalised", "t_g", analysis.detection.generalised, "third"),
    )
    return tuple(
        Span(f"{label} {between(time)}" if named else "", mark, time.after, time.by, tone)
        for label, mark, time, tone in times
        if time is not None
    )


def between(time: StepInterval | None) -> str:
    """Return an interval of steps in words: ``(20, 30]``."""
    return "not observed" if time is None else f"({number(time.after)}, {number(time.by)}]"


def summary(source: Source) -> MonitorSummary | None:
    """Return the summary of a run that was watched for grokking, and not for its gradients."""
    names = [n for n in source.run.scalar_names("backlight") if n.startswith(GEOMETRY)]
    if source.run.has("gradient") or not names:
        return None
    steps = np.unique(np.concatenate([source.scalar(name).steps for name in names]))
    detail = f"The geometry of gradients was measured at {count(len(steps), 'step')}."
    analysis = analysis_of(source)
    headline = f"Verdict on grokking: {analysis.detection.words}" if analysis else ""
    return MonitorSummary(detail, _figures, headline=headline)


def _figures(source: Source) -> Figures:
    analysis = analysis_of(source)
    if analysis is None:
        return ()
    accuracy = source.scalar("test_accuracy", source="user")
    last = accuracy.values[-1:]
    theirs = analysis.control_detection
    control = theirs.words if theirs else "is one" if analysis.facts.control else "not run"
    shown = number(float(last[0]), 3) if len(last) else "not measured"
    at = f"at step {number(int(accuracy.steps[-1]))}" if len(last) else ""
    return (
        ("verdict", analysis.detection.words, ""),
        ("memorised in steps", between(analysis.detection.memorised), ""),
        ("generalised in steps", between(analysis.detection.generalised), ""),
        ("last test accuracy", shown, at),
        ("control", control, "random labels" if theirs else ""),
    )


def measured(run: Run, name: str, source: str = "backlight") -> Scalar | None:
    """Return a scalar with at least one log, else None."""
    if name not in run.scalar_names(source):
        return None
    scalar = run.scalar(name, source=source)
    return scalar if len(scalar.steps) else None


def lines_of(source: Source, metrics: Sequence[tuple[str, str]], origin: str = "backlight") -> list[Line]:
    """Return a line for each metric (scalar, label) that was recorded, and a dashed one of the control's."""
    analysis = analysis_of(source)
    control = analysis.control if analysis else None
    lines = []
    for place, (name, label) in enumerate(metrics):
        mine = measured(source.run, name, origin)
        if mine is None:
            continue
        tone = TONES[place % len(TONES)]
        lines.append(Line(label, mine.steps, mine.values, tone=tone))
        theirs = measured(control, name, origin) if control is not None else None
        if theirs is not None:
            lines.append(Line(f"{label}, control", theirs.steps, theirs.values, style="dashed", tone=tone))
    return lines


def scaled(lines: Sequence[Line], label: str) -> Axis:
    """Return an axis that is logarithmic where the values ask for it."""
    return Axis(label, log=spans_decades(*(line.values for line in lines), factor=30.0))


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
    facts = [PanelFact("verdict", detection.words)]
    facts += [PanelFact("memorised in steps", between(detection.memorised))]
    facts += [PanelFact("generalised in steps", between(detection.generalised))]
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
    rows = [("verdict", f"{detection.words}. {detection.claim}")]
    rows += [
        (row.name, f"{_HELD[row.held]}: {row.got}, expected {row.expected}") for row in detection.conditions
    ]
    facts = []
    if detection.sweep:
        lines = f"{sum(point.grokking for point in detection.sweep)} of {len(detection.sweep)}"
        rows.append(("sweep", f"grokking at {lines} lines, training accuracy and way to the plateau"))
        facts.append(PanelFact("lines of the sweep", lines))
    if theirs is not None:
        rows.append(("control", f"{theirs.words}. {theirs.claim}"))
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
    "(-) where it is strongest. Any long fall correlates with any long rise, and two controls differ as "
    "well: control is how far their measure moves with the accuracy, as a share, and q the false-discovery "
    "rate at which the two differ, over all measures and leads. Leads are in steps; ends are "
    "medians of the last tenth.",
    monitor="grokking",
)
def correlations(source: Source) -> Drawn | NotMeasured:
    """List the measures, the strongest first, with the control's numbers next to them."""
    learning = analysis_of(source)
    if learning is None or not learning.following:
        return NotMeasured("No measure was recorded at steps with a test accuracy.")
    remark = learning.signals() if learning.controls else "Without a control no conclusion is drawn."
    return tabular(following_table(learning), remarks=[remark])
