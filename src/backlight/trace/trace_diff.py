"""Difference of two traces, per step: what became slower, was added, or is gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.trace.analysis import RankAnalysis
from backlight.trace.operators import Row


@dataclass(frozen=True)
class DiffRow:
    """One name in both traces: calls and nanoseconds per step; 0 where a trace lacks it."""

    name: str
    phase: str
    calls: tuple[float, float]
    time: tuple[float, float]

    @property
    def change(self) -> float:
        """Nanoseconds per step that the second takes longer."""
        return self.time[1] - self.time[0]


@dataclass(frozen=True)
class TraceDiff:
    """Two traces, the second against the first; the rows of each table add up to ``total``.

    ``where`` is ``"device"``, or ``"host"`` unless both traces have a device. ``steps`` are counts, ``step``
    median durations, ``total`` what the steps take there, in nanoseconds per step.
    """

    paths: tuple[str, str]
    where: str
    steps: tuple[int, int]
    step: tuple[float, float]
    total: tuple[float, float]
    kinds: tuple[DiffRow, ...]
    modules: tuple[DiffRow, ...]  # none, unless both traces have ranges of modules
    operators: tuple[DiffRow, ...]
    kernels: tuple[DiffRow, ...]
    notes: tuple[str, ...]
    unit: str = "ns"


def diff(first: RankAnalysis, second: RankAnalysis) -> TraceDiff:
    """Compare two traces per step; without steps, of the whole trace."""
    sides = (first, second)
    on_device = all(side.device_total for side in sides)
    lengths = [{row.number: row.duration for row in side.steps} for side in sides]
    counts = [max(1, len(length)) for length in lengths]
    totals = [(s.device_total if on_device else s.host_total) / n for s, n in zip(sides, counts, strict=True)]
    notes = []
    if on_device and set(first.devices.values()) != set(second.devices.values()):
        left, other = (", ".join(sorted(set(side.devices.values()))) or "unknown" for side in sides)
        notes.append(f"the devices differ: {left} against {other}")
    if any(None in length for length in lengths):
        notes.append("a trace has no steps: it counts as one step")

    def table(name: str) -> tuple[DiffRow, ...]:
        tables = [getattr(side, name) for side in sides]
        return _joined(tables, counts, on_device=on_device)

    return TraceDiff(
        (first.path, second.path), "device" if on_device else "host", (counts[0], counts[1]),
        (_median(lengths[0].values()), _median(lengths[1].values())), (totals[0], totals[1]),
        table("kinds"), table("modules") if first.modules and second.modules else (),
        table("operators"), table("kernels") if on_device else (), tuple(notes),
    )  # fmt: skip


def _median(values: object) -> float:
    return float(np.median(list(values)))  # type: ignore[call-overload]


def _joined(
    tables: Sequence[Sequence[Row]], counts: Sequence[int], *, on_device: bool
) -> tuple[DiffRow, ...]:
    sides: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[0.0, 0.0], [0.0, 0.0]])
    for side, (rows, count) in enumerate(zip(tables, counts, strict=True)):
        for row in rows:
            calls, time = sides[row.name, row.phase]
            calls[side] += row.calls / count
            time[side] += (row.device if on_device else row.host) / count
    joined = [
        DiffRow(name, phase, (calls[0], calls[1]), (time[0], time[1]))
        for (name, phase), (calls, time) in sides.items()
    ]
    return tuple(sorted(joined, key=lambda row: -abs(row.change)))
