"""What the ranks say one by one: their losses, their own norms, their step times, and how each ended."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.store.read.run import Spread
from backlight.text import number

LINES = 8
"""Ranks with a line each; of more, the lowest, the median and the highest are drawn."""

FACTS = 16


@panel(
    "ranks",
    title="Ranks",
    order=108,
    series=("ranks",),
    note=(
        "What each process saw by itself: the loss of its part of the batch, the norm of the gradients "
        "that it holds, the time between its steps."
    ),
    several=True,
)
def ranks(source: Source) -> Drawn | NotMeasured:
    """Draw the spread over ranks, where there are several."""
    run = source.run
    states = run.ranks()
    if len(states) < 2:
        return NotMeasured("One process trained.")
    charts = []
    for spread, title, axis in (
        (run.spread("loss"), "Loss of each rank", Axis("loss")),
        (run.spread("total_norm"), "Norm of what each rank holds", Axis("norm (gradient)", log=True)),
        (_between(run.spread("time")), "Time between steps", Axis("s", low=0.0)),
    ):
        if len(spread.ranks) > 1 and len(spread.steps):
            charts.append(chart(_lines(spread), axis, title=title))
    if not charts:
        return NotMeasured("No number was recorded by more than one rank.")
    facts = [Fact("ranks", str(len(states)))]
    last = max(state.last_step for state in states)
    for state in [s for s in states if s.status.value != "finished" or s.last_step < last][:FACTS]:
        after = f"after step {number(state.last_step)}" if state.last_step >= 0 else "before its first step"
        facts.append(Fact(f"rank {state.rank}", f"{state.status.value} {after}"))
    remarks = []
    ill = run.spread("loss").first_non_finite()
    if ill is not None:
        step, who = ill
        named = ", ".join(map(str, who[:FACTS]))
        remarks.append(f"The first loss that is not finite is at step {step}, on rank {named}.")
    if any(len(spread.ranks) > LINES for spread in (run.spread("loss"), run.spread("total_norm"))):
        remarks.append(
            "Of so many ranks the lowest, the median and the highest value are drawn at each step."
        )
    data: dict[str, Any] = {"charts": charts, "small": True}
    return Drawn("lines", data, tuple(facts), tuple(remarks))


def _lines(spread: Spread) -> list[Line]:
    if len(spread.ranks) <= LINES:
        return [
            Line(f"rank {rank}", spread.steps, spread.values[:, r], gaps=True)
            for r, rank in enumerate(spread.ranks)
        ]
    rows = np.isfinite(spread.values).any(axis=1)
    steps, values = spread.steps[rows], np.where(np.isfinite(spread.values), spread.values, np.nan)[rows]
    kinds: tuple[tuple[str, NDArray[np.float64]], ...] = (
        ("lowest", np.nanmin(values, axis=1)),
        ("median", np.nanmedian(values, axis=1)),
        ("highest", np.nanmax(values, axis=1)),
    )
    return [Line(label, steps, line) for label, line in kinds]


def _between(times: Spread) -> Spread:
    """Return seconds per step from the times at which steps ended, spread evenly over steps between."""
    if len(times.steps) < 2:
        return Spread((), times.steps[:0], times.values[:0, :0], times.logged[:0, :0], "s")
    values = np.diff(times.values, axis=0) / np.diff(times.steps)[:, None]
    return Spread(times.ranks, times.steps[1:], values, ~np.isnan(values), "s")
