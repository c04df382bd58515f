"""Stored runs of the health monitor, from synthetic series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backlight.records import ParameterRecord, RunStatus
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter


def parameter(name: str, shape: tuple[int, ...] = (8, 8), **more: Any) -> ParameterRecord:
    more = {"module": name.rpartition(".")[0], "module_type": "Linear", "group": "0/0", **more}
    return ParameterRecord(name, shape, more.pop("dtype", "float32"), "cpu", int(np.prod(shape)), **more)


def write_synthetic(
    path: Path,
    rms: Mapping[str, Sequence[float]],
    *,
    records: Mapping[str, ParameterRecord] | None = None,
    extra: Sequence[ParameterRecord] = (),
    steps: Sequence[int] | None = None,
    zeros: Mapping[str, Sequence[float]] | None = None,
    nan: Mapping[tuple[str, int], int] | None = None,
    update: Mapping[str, Sequence[float]] | None = None,
    weight: float | Sequence[float] = 1.0,
    weights: Mapping[str, Sequence[float]] | None = None,
    sampled: int | None = None,
    scalars: Mapping[str, Mapping[int, float] | Sequence[float]] | None = None,
    events: Sequence[tuple[int | None, str, Mapping[str, Any]]] = (),
    groups: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, float]] | None = None,
    monitors: tuple[str, ...] = ("health",),
    writer: RunWriter | None = None,
) -> Run:
    """Write series of the rms per parameter (NaN: not measured); ``zeros`` are shares of zeros."""
    table = [(records or {}).get(name) or parameter(name) for name in rms] + list(extra)
    count = len(next(iter(rms.values()))) if rms else 0
    steps = range(count) if steps is None else steps
    writer = writer or RunWriter.create(
        path, name="synthetic", groups=groups, overrides=overrides, monitors=monitors
    )
    identifier = writer.parameter_table(tuple(table))
    for row, step in enumerate(steps):
        floats, ints = np.zeros((len(table), 3)), np.zeros((len(table), 5), dtype=np.int64)
        moved, counts = np.zeros((len(table), 2)), np.zeros((len(table), 3), dtype=np.int64)
        for i, record in enumerate(table):
            value = rms.get(record.name, [np.nan] * count)[row]
            bad = (nan or {}).get((record.name, int(step)), 0)
            if np.isnan(value) and not bad:
                continue
            norm = value * np.sqrt(record.numel)
            share = 1.0 if value == 0 else (zeros or {}).get(record.name, [0.0] * count)[row]
            floats[i] = (np.nan if bad else norm, np.nan if bad else norm / 2, 0.0)
            ints[i] = (1, record.numel, round(share * record.numel), bad, 0)
            if update is not None and record.name in update:
                same = weight if isinstance(weight, float) else weight[row]
                norm = weights[record.name][row] if record.name in (weights or {}) else same
                moved[i] = (update[record.name][row] * norm, norm)
                counts[i] = (1, sampled or record.numel, record.numel)
        writer.append("gradient", int(step), identifier, floats, ints)
        if update is not None:
            writer.append("update", int(step), identifier, moved, counts)
    for name, values in (scalars or {}).items():
        pairs = values.items() if isinstance(values, Mapping) else zip(steps, values, strict=True)
        for step, value in pairs:
            writer.scalar(int(step), name, float(value))
    for step, kind, payload in events:
        writer.event(step, kind, payload)
    writer.close(RunStatus.FINISHED)
    return open_run(path)
