"""The builder of stored runs for tests: :func:`build_run`, and runs of two monitors from known series.

``grokking_runs``, ``spectra_runs`` and ``report/synthetic`` build the runs of larger plans.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.monitors.steptime.model.evidence import RUNTIME_INFO
from backlight.records import Finding, Fingerprint, ParameterRecord, RunStatus
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter

Scalars = Mapping[str, "Mapping[int, float] | Sequence[float]"] | Mapping[int, Mapping[str, float]]
"""Values by name, then by step (a sequence: of steps 0, 1, ...); or by step, then by name."""

Events = Sequence[tuple[int | None, str, Mapping[str, Any]]]
"""Step, kind and payload of each event."""

Row = tuple[npt.ArrayLike, npt.ArrayLike]


def parameter(name: str, shape: tuple[int, ...] = (8, 8), **more: Any) -> ParameterRecord:
    more = {"module": name.rpartition(".")[0], "module_type": "Linear", "group": "0/0", **more}
    return ParameterRecord(name, shape, more.pop("dtype", "float32"), "cpu", int(np.prod(shape)), **more)


def gradient_row(table: Sequence[ParameterRecord], norm: npt.ArrayLike = 1.0) -> Row:
    """Return a row ``[P, 3]``, ``[P, 5]`` of the series ``gradient``: measured, without zeros."""
    floats = np.zeros((len(table), 3))
    floats[:] = np.broadcast_to(np.asarray(norm, dtype=float), len(table))[:, None]
    return floats, np.array([[1, record.numel, 0, 0, 0] for record in table]).reshape(-1, 5)


def by_step(scalars: Scalars) -> dict[int, dict[str, float]]:
    """Return ``scalars`` by step, then by name."""
    rows: dict[int, dict[str, float]] = {}
    for key, values in scalars.items():
        if isinstance(key, int):
            rows.setdefault(key, {}).update(values)  # type: ignore[arg-type]
            continue
        for step, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            rows.setdefault(int(step), {})[key] = float(value)  # type: ignore[arg-type]
    return rows


def fill(
    writer: RunWriter,
    *,
    table: Sequence[ParameterRecord] = (),
    series: Mapping[str, Mapping[int, Row]] | None = None,
    scalars: Scalars | None = None,
    user: Scalars | None = None,
    events: Events = (),
    findings: Iterable[Finding] = (),
    fingerprint: Fingerprint | None = None,
    evidence: Mapping[str, Any] | None = None,
    write: Callable[[RunWriter], object] | None = None,
) -> None:
    """Write records of one rank.

    ``user`` are scalars of the script; ``evidence`` that is no text is stored as JSON; ``write`` writes the
    rest.
    """
    if fingerprint is not None:
        writer.fingerprint(fingerprint)
    identifier = writer.parameter_table(tuple(table)) if table else 0
    for name, rows in (series or {}).items():
        for step, (floats, integers) in rows.items():
            writer.append(name, step, identifier, floats, integers)
    for source, values in (("backlight", scalars), ("user", user)):
        for step, row in by_step(values or {}).items():
            writer.scalars(step, row, source)
    for step, kind, payload in events:
        writer.event(step, kind, payload)
    for finding in findings:
        writer.finding(finding)
    for name, content in (evidence or {}).items():
        writer.evidence(name, content if isinstance(content, str | bytes) else json.dumps(content))
    if write is not None:
        write(writer)


def open_ranks(
    path: Path, *, world_size: int = 2, ranks: int | None = None, **options: Any
) -> list[RunWriter]:
    """Return open writers of all ranks of a run, or of the first ``ranks``."""
    return [
        RunWriter.create(path, rank=rank, world_size=world_size, run_id="one", **options)
        for rank in range(world_size if ranks is None else ranks)
    ]


def build_run(path: Path, *, status: RunStatus = RunStatus.FINISHED, **options: Any) -> Run:
    """Write a run and open it; ``options`` are those of :func:`fill` and of :meth:`RunWriter.create`."""
    records = {name: options.pop(name) for name in inspect.signature(fill).parameters if name in options}
    writer = RunWriter.create(path, **options)
    fill(writer, **records)
    writer.close(status)
    return open_run(writer.path)  # a rank that joins no run has a directory of its own


def build_health_run(
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
    **options: Any,
) -> Run:
    """Build a run from the rms of each parameter (NaN: not measured); ``zeros`` are shares of zeros."""
    table = [(records or {}).get(name) or parameter(name) for name in rms] + list(extra)
    count = len(next(iter(rms.values()))) if rms else 0
    steps = range(count) if steps is None else steps
    series: dict[str, dict[int, Row]] = {"gradient": {}, "update": {}}
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
        series["gradient"][int(step)] = floats, ints
        if update is not None:
            series["update"][int(step)] = moved, counts
    placed = {
        name: values if isinstance(values, Mapping) else dict(zip(steps, values, strict=True))
        for name, values in (scalars or {}).items()
    }
    options = {"name": "synthetic", "monitors": ("health",), **options}
    return build_run(path, table=table, series=series, scalars=placed, **options)


def build_steptime_run(
    path: Path,
    phases: Mapping[str, float] | None = None,
    *,
    steps: int = 60,
    changes: Mapping[tuple[int, str], float] | None = None,
    profile: Mapping[str, Any] | None = None,
    runtime_info: Mapping[str, Any] | None = {},  # written as it is; None of a run that goes on
    events: Events = (),
    fingerprint: Fingerprint | None = None,
    ranks: Sequence[Mapping[str, float]] = (),
    scalars: Mapping[str, Mapping[int, float]] | None = None,
    seed: int = 0,
) -> Run:
    """Write steps whose phases scatter by one percent around ``phases``; ``changes`` set single times."""
    random = np.random.default_rng(seed)
    each = list(ranks) or [phases or {}]
    writers = open_ranks(path, world_size=len(each), name="run", monitors=("steptime",))
    for rank, (writer, levels) in enumerate(zip(writers, each, strict=True)):
        for step in range(steps if levels else 0):
            for name, level in levels.items():
                value = level * float(np.exp(random.normal(0, 0.01)))
                writer.scalar(step, f"phase/{name}", (changes or {}).get((step, name), value))
        ending = [(steps - 1, RUNTIME_INFO, runtime_info)] if runtime_info is not None else []
        files = {"profile.json": profile} if profile is not None and rank == 0 else {}
        fill(writer, scalars=scalars, events=[*events, *ending], fingerprint=fingerprint, evidence=files)
    for writer in writers[::-1]:  # an attempt ends with its rank 0
        writer.close()
    return open_run(path)
