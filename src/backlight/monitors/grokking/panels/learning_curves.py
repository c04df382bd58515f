"""Accuracies and losses over steps with the two times marked, and those of the control beside them."""

from __future__ import annotations

from backlight.report.charts import Axis, chart
from backlight.report.geometry import between, lines_of, scaled, spans
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import listed, number, visible

ACCURACIES = (("train_accuracy", "training accuracy"), ("test_accuracy", "test accuracy"))
LOSSES = (("train_loss", "training loss"), ("test_loss", "test loss"))


@panel(
    "learning_curves",
    title="Learning curves",
    order=1,
    series=("user/train_accuracy", "user/test_accuracy", "user/train_loss", "user/test_loss"),
    note="A time is known to lie between two logs: after the first of them, at the second at the latest.",
    monitor="grokking",
)
def learning_curves(source: Source) -> Drawn | NotMeasured:
    """Draw accuracies and losses; dashed lines are the control's."""
    if "grokking" not in source.run.monitors:
        return NotMeasured("The monitor grokking did not watch; what was logged is among your scalars.")
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
        remarks.append("No matched control was found beside this run.")
    return Drawn("lines", {"charts": charts}, tuple(facts), tuple(remarks))
