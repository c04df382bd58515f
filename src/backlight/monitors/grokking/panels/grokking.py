"""The verdict on grokking: each of its conditions with what was expected and what was seen."""

from __future__ import annotations

from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

_WORDS = {True: "holds", False: "fails", None: "not known"}


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
            "Grokking is judged by both accuracies, and they were not logged or are no shares."
        )
    rows = [("verdict", f"{learning.verdict}. {learning.claim}")]
    rows += [
        (row.name, f"{_WORDS[row.held]}: {row.got}, expected {row.expected}") for row in learning.conditions
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
        rows.append(("control", "None was found. No measure of this run can be said to signal grokking."))
    remarks = tuple(f"{visible(note)}." for note in learning.notes)
    return Drawn("table", {"rows": [(k, visible(v)) for k, v in rows], "tree": []}, tuple(facts), remarks)
