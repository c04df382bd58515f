"""Panels of the memory account: over the step, and by module at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight import codec
from backlight.monitors.steptime.model.step_tables import memory_tables
from backlight.report.charts import TONES, Axis, Line, chart
from backlight.report.panel import Drawn, Figures, MonitorSummary, NotMeasured, PanelFact, panel, tabular
from backlight.report.source import Source
from backlight.text import size, visible

NAME = "memory.json"

_NONE = "No memory was recorded: backlight memory SCRIPT --out RUN records it."


@dataclass(frozen=True)
class Accounted:
    """Record of ``memory --out``: the result, events [P] of the steps, and bytes [kinds, P] there."""

    result: Mapping[str, Any]
    positions: NDArray[np.int64]
    curve: NDArray[np.float64]


def account_of(source: Source) -> Accounted | str:
    """Return the newest account of a run, or why there is none."""
    paths = source.evidence(f"/{NAME}")
    if not paths:
        return _NONE
    path = max(paths)
    try:
        result = codec.decode(source.run.read_evidence(path).decode("utf-8"))
        attempt = int(path.split("/")[0].removeprefix("attempt-"))
        positions, curve = (source.array(f"memory/{name}", attempt)[1] for name in ("positions", "curve"))
        if not len(positions) or not len(curve):
            return f"The curve of {path} is missing: the result was not written completely."
        return Accounted(result, np.asarray(positions[-1], np.int64), np.asarray(curve[-1], np.float64))
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}."


_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
LARGEST = 3
"""Kinds of tensors under the verdict."""


def summary(source: Source) -> MonitorSummary | None:
    """Return the summary of a run that holds an account of memory and nothing else."""
    account = account_of(source) if source.run.monitors == ("steptime",) else ""
    if isinstance(account, str):
        return None
    result = account.result
    peak, phase = size(float(result["peak"])), visible(result["phase_at_peak"])
    detail = f"The memory of every tensor over a step was {visible(result['how'])}."
    return MonitorSummary(detail, _figures, headline=f"Peak memory {peak}, in the phase {phase}")


def _figures(source: Source) -> Figures:
    account = account_of(source)
    if isinstance(account, str):
        return ()
    result = account.result
    kinds = sorted(result["kinds"].items(), key=lambda item: -item[1])[:LARGEST]
    return (
        ("peak", size(float(result["peak"])), f"in {visible(result['phase_at_peak'])}"),
        ("between steps", size(float(result["between_steps"])), ""),
        *((visible(kind).replace("_", " "), size(float(nbytes)), "at the peak") for kind, nbytes in kinds),
    )


@panel(
    "memory_steps",
    title="Memory over the step",
    order=55,
    series=("arrays/memory",),
    note="Bytes of all tensors after each allocation and free, by kind.",
    monitor="steptime",
    summary=summary,
)
def memory_steps(source: Source) -> Drawn | NotMeasured:
    """Stack the kinds as bands."""
    account = account_of(source)
    if isinstance(account, str):
        return NotMeasured(account)
    result, at = account.result, account.positions
    peak = float(account.curve.sum(axis=0).max())
    factor, unit = next((entry for entry in _UNITS if peak >= entry[0]), (1.0, "B"))
    kinds = zip(result["curve"]["kinds"], account.curve / factor, strict=True)
    drawn_kinds = [(visible(str(kind)).replace("_", " "), row) for kind, row in kinds if row.any()]
    events = np.arange(int(result["curve"]["events"]))
    lines = [
        Line(label, at, row, style="area", tone=TONES[place % len(TONES)], recorded=events)
        for place, (label, row) in enumerate(drawn_kinds)
    ]
    marks: dict[str, list[int]] = {}
    for begin, name in result["curve"]["phases"]:
        if name in {"forward", "backward", "optimizer"}:
            near = int(at[min(len(at) - 1, int(np.searchsorted(at, begin)))])
            marks.setdefault(f"{visible(name)} begins", []).append(near)
    drawn = chart(
        lines,
        Axis(unit, low=0.0),
        marks={name: np.unique(np.array(steps, dtype=np.int64)) for name, steps in marks.items()},
        across="event",
    )
    facts = (
        PanelFact("peak", size(float(result["peak"]))),
        PanelFact("in", visible(str(result["phase_at_peak"]))),
        PanelFact("how", visible(str(result["how"]))),
    )
    remarks = ["The bands are stacked."]
    if len(at) < len(events):
        remarks.append(f"Of {len(events):,} events the highest of each of {len(at):,} ranges is drawn.")
    return Drawn("lines", {"charts": [drawn]}, facts, tuple(remarks))


@panel(
    "memory_modules",
    title="Memory at the peak by module",
    order=56,
    series=("memory/modules",),
    note="Each storage once, under the innermost module whose forward or backward allocated it.",
    monitor="steptime",
)
def memory_modules(source: Source) -> Drawn | NotMeasured:
    """List the modules, the largest first."""
    account = account_of(source)
    if isinstance(account, str):
        return NotMeasured(account)
    return tabular(memory_tables(account.result)["modules"])
