"""How many steps of the training loop were observed."""

from __future__ import annotations

from backlight.monitors.correctness.model.facts import observed_steps
from backlight.report.panel import Drawn, Figures, MonitorSummary, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import count, number


def summary(source: Source) -> MonitorSummary | None:
    """Return the summary of a run in which nothing but the loop was watched."""
    steps = observed_steps(source.run)
    return (
        MonitorSummary(f"The training loop was checked at {count(steps, 'step')}.", figures)
        if steps
        else None
    )


def figures(source: Source) -> Figures:
    """Return how much was checked."""
    return (
        ("steps checked", number(observed_steps(source.run)), "the first ones, then at growing intervals"),
    )


def checked(source: Source) -> str:
    """Return what the facts of the loop are about, and at how many steps they were compared."""
    steps = count(observed_steps(source.run), "step")
    return f"the loop, at {steps}: order of calls, what the optimizer holds, modes, rates, dtypes, inputs"


@panel(
    "training_loop",
    title="Checks of the training loop",
    order=90,
    series=("events/contradiction",),
    monitor="correctness",
    place="details",
    summary=summary,
    checked=checked,
)
def training_loop(source: Source) -> Drawn | NotMeasured:
    """State at how many steps the facts of the loop were compared."""
    steps = observed_steps(source.run)
    if not steps:
        return NotMeasured(
            source.reason("contradiction", "correctness", otherwise="This is recorded when a run ends.")
        )
    text = f"Facts were compared at {count(steps, 'step')}; contradictions among them are findings."
    return Drawn("words", {"text": text})
