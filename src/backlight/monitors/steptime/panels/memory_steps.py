"""The memory of a step from event to event, stacked by what it is for."""

from __future__ import annotations

import numpy as np

from backlight.report.charts import Axis, Line, chart
from backlight.report.memory_account import account_of
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import size, visible

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@panel(
    "memory_steps",
    title="Memory over the step",
    order=105,
    series=("arrays/memory",),
    note="Bytes of all tensors after each storage that came or went, by what they are for.",
    monitor="steptime",
)
def memory_steps(source: Source) -> Drawn | NotMeasured:
    """Draw the kinds as bands one above the other, what stays at the bottom."""
    account = account_of(source)
    if isinstance(account, str):
        return NotMeasured(account)
    told, at = account.told, account.positions
    peak = float(account.curve.sum(axis=0).max())
    factor, unit = next((entry for entry in _UNITS if peak >= entry[0]), (1.0, "B"))
    lines: list[Line] = []
    below = np.zeros(len(at))
    for kind, row in zip(told["curve"]["kinds"], account.curve / factor, strict=True):
        if row.any():
            label = visible(str(kind)).replace("_", " ")
            lines += [
                Line(label, at, below + row, style="edge", down_to=f"below {label}"),
                Line(f"below {label}", at, below, style="edge"),
            ]
            below = below + row
    tones = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    lines = [
        Line(
            line.label,
            line.steps,
            line.values,
            style=line.style,
            tone=tones[i // 2 % 8],
            down_to=line.down_to,
        )
        for i, line in enumerate(lines)
    ]
    lines.append(Line("all", at, below, tone="eighth"))
    marks: dict[str, list[int]] = {}
    for begin, name in told["curve"]["phases"]:
        if name in {"forward", "backward", "optimizer"}:
            near = int(at[min(len(at) - 1, int(np.searchsorted(at, begin)))])
            marks.setdefault(f"{visible(name)} begins", []).append(near)
    drawn = chart(
        lines,
        Axis(unit, low=0.0),
        marks={name: np.unique(np.array(places, dtype=np.int64)) for name, places in marks.items()},
        across="event",
    )
    facts = (
        Fact("peak", size(float(told["peak"]))),
        Fact("in", visible(str(told["phase_at_peak"]))),
        Fact("how", visible(str(told["how"]))),
    )
    remarks = ["A band reaches from what lies below it to that plus its own."]
    events = int(told["curve"]["events"])
    if len(at) < events:
        remarks.append(f"Of {events:,} events the highest of each of {len(at):,} ranges is drawn.")
    return Drawn("lines", {"charts": [drawn]}, facts, tuple(remarks))
