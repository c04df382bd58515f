"""A run as tables, in the terms of any database: names, columns with units, rows some at a time. No torch.

What was not measured is void, never a number; NaN that was measured is NaN. A table is read when its rows
are asked for, and only the columns that are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Finding, to_json
from backlight.store.export.chunk import Chunk
from backlight.store.export.files import scalar_chunks
from backlight.store.export.spectra_table import COLUMNS as SPECTRA_COLUMNS
from backlight.store.export.spectra_table import FLOATS as SPECTRA_FLOATS
from backlight.store.export.spectra_table import TEXTS as SPECTRA_TEXTS
from backlight.store.export.spectra_table import spectra_chunks
from backlight.store.format.names import storable
from backlight.store.format.schema import SCALARS, SERIES, SeriesSchema
from backlight.store.format.spectra import LAYER as SPECTRA_LAYER
from backlight.store.platform import atomic_json
from backlight.store.read.run import Run

CHUNK_ROWS = 250_000
"""Rows of a series that are in memory at a time."""

INTEGER, FLOAT, TEXT, TRUTH = "integer", "float", "text", "truth"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column; ``kind`` is integer, float, text or truth."""

    name: str
    kind: str
    unit: str = ""
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a run; ``chunks(wanted)`` yields its rows with at least the wanted columns."""

    name: str
    meaning: str
    columns: tuple[TableColumn, ...]
    chunks: Callable[[Collection[str]], Iterator[Chunk]]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(column.name for column in self.columns)


_STEP = TableColumn("step", INTEGER, "step", "optimizer step over all attempts")
_ATTEMPT = TableColumn("attempt", INTEGER, "", "which start of the training")
_PARAMETER = TableColumn("parameter", TEXT, "", "name of the parameter")
_RANK = TableColumn("rank", INTEGER, "", "rank that recorded it")


def tables_of(run: Run, findings: Callable[[], Sequence[Finding]] | None = None) -> dict[str, Table]:
    """Return the tables of a run by name; series that it does not hold are left out.

    Parameters
    ----------
    run
        The stored run.
    findings
        Gives the findings of the table ``findings``; without it those that were stored.
    """
    tables = [_series(run, schema) for name, schema in SERIES.items() if run.has(name)]
    tables += [_steps(run), _scalars(run), _events(run), findings_table(findings or run.stored_findings)]
    tables += [_parameters(run), _attempts(run)]
    if run.events(SPECTRA_LAYER):
        tables.append(_spectra(run))
    return {table.name: table for table in tables}


def _series(run: Run, schema: SeriesSchema) -> Table:
    kinds = {c.name: INTEGER if c.integer else FLOAT for c in schema.columns}
    own = [
        TableColumn(c.name, kinds[c.name], c.unit, c.meaning) for c in schema.columns if c.name != "measured"
    ]
    whole = {"non_finite"}
    own += [
        TableColumn(d.name, INTEGER if d.name in whole else FLOAT, d.unit, d.meaning) for d in schema.derived
    ]
    measured = TableColumn("measured", TRUTH, "", "whether it was; else the numbers are null")

    def chunks(wanted: Collection[str]) -> Iterator[Chunk]:
        names = np.array([storable(p.name) for p in run.parameters()], dtype=object)
        P = len(names)
        for attempt in run.attempts:
            frames = {
                c.name: run.frame(schema.name, c.name, attempt=attempt.index) for c in own if c.name in wanted
            }
            seen = next(iter(frames.values()), None) or run.frame(
                schema.name, "measured", attempt=attempt.index
            )
            rows_each = max(1, CHUNK_ROWS // max(P, 1))
            for start in range(0, len(seen.steps) if P else 0, rows_each):
                rows = slice(start, start + rows_each)
                steps = seen.steps[rows]
                S = len(steps)
                there = seen.measured[rows].reshape(-1)
                columns: dict[str, npt.NDArray[Any]] = {
                    "step": np.repeat(steps, P),
                    "attempt": np.full(S * P, attempt.index, dtype=np.int64),
                    "parameter": np.tile(names, S)
                    if "parameter" in wanted
                    else np.empty(S * P, dtype=object),
                    "measured": there,
                }
                void = {name: np.zeros(S * P, dtype=bool) for name in columns}
                for name, frame in frames.items():
                    columns[name] = frame.values[rows].reshape(-1)
                    void[name] = ~frame.measured[rows].reshape(-1)
                yield Chunk(columns, void)

    meaning = f"one row per step and parameter of the series {schema.name}"
    return Table(schema.name, meaning, (_STEP, _ATTEMPT, _PARAMETER, measured, *own), chunks)


def _steps(run: Run) -> Table:
    sources = {name: ("backlight", name) for name in run.scalar_names("backlight")}
    sources |= {f"user/{name}": ("user", name) for name in run.scalar_names("user")}

    def unit(source: str, name: str) -> str:
        schema = SCALARS.get(name) or SCALARS.get(name.split("/", maxsplit=1)[0])
        return schema.unit if schema is not None and source == "backlight" else "1"

    def chunks(wanted: Collection[str]) -> Iterator[Chunk]:
        every = {name: run.scalar(of, source) for name, (source, of) in sources.items()}
        logged = [scalar.steps for scalar in every.values()]
        steps = np.unique(np.concatenate(logged)) if logged else np.zeros(0, dtype=np.int64)
        columns: dict[str, npt.NDArray[Any]] = {"step": steps}
        void = {"step": np.zeros(len(steps), dtype=bool)}
        for name, scalar in every.items():
            if name in wanted:
                at = np.searchsorted(steps, scalar.steps)
                columns[name], void[name] = np.full(len(steps), np.nan), np.ones(len(steps), dtype=bool)
                columns[name][at], void[name][at] = scalar.values, False
        yield Chunk(columns, void)

    own = [TableColumn(storable(name), FLOAT, unit(*of), "") for name, of in sources.items()]
    return Table(
        "steps", "one row per step, a column per scalar; a later attempt counts", (_STEP, *own), chunks
    )


def _scalars(run: Run) -> Table:
    own = (
        TableColumn("source", TEXT, "", "backlight or user"),
        TableColumn("name", TEXT),
        TableColumn("value", FLOAT, "", "in the unit beside it"),
        TableColumn("unit", TEXT),
    )
    about = "one row per attempt, step and scalar"
    return Table("scalars", about, (_STEP, _ATTEMPT, *own), lambda _wanted: scalar_chunks(run))


def _events(run: Run) -> Table:
    columns = (
        _STEP,
        _ATTEMPT,
        _RANK,
        TableColumn("time", FLOAT, "s", "Unix time"),
        TableColumn("kind", TEXT),
        TableColumn("payload", TEXT, "", "a JSON object"),
    )

    def rows() -> Iterator[tuple[Any, ...]]:
        for e in run.events():
            yield e.step, e.attempt, e.rank, e.time, storable(e.kind), atomic_json.dump(dict(e.payload))

    return Table("events", "one row per event", columns, lambda _wanted: _listed(columns, rows()))


def findings_table(findings: Callable[[], Sequence[Finding]]) -> Table:
    """Return the table of what ``findings`` gives when its rows are read."""
    columns = (
        TableColumn("rule", TEXT),
        TableColumn("severity", TEXT, "", "info, warning or error"),
        TableColumn("monitor", TEXT),
        TableColumn("title", TEXT),
        TableColumn("detail", TEXT),
        _PARAMETER,
        TableColumn("module", TEXT),
        _STEP,
        _RANK,
        TableColumn("line", TEXT),
        TableColumn("verdict", TEXT),
        TableColumn("phase", TEXT),
        TableColumn("evidence", TEXT, "", "a JSON list"),
        TableColumn("fix", TEXT),
        TableColumn("refuted_if", TEXT),
        TableColumn("version", INTEGER, "", "of the rule"),
        TableColumn("made", TEXT, "", "live or by a reader"),
    )

    def rows() -> Iterator[tuple[Any, ...]]:
        for f in findings():
            s = f.subject
            place = (s.parameter, s.module, s.step, s.rank, s.line, s.verdict, s.phase)
            evidence = atomic_json.dump(to_json(f.evidence))
            yield (
                f.rule, f.severity.value, f.monitor, f.title, f.detail, *place, evidence, f.fix, f.refuted_if,
                f.version, f.made.value,
            )  # fmt: skip

    return Table("findings", "one row per finding", columns, lambda _wanted: _listed(columns, rows()))


def _parameters(run: Run) -> Table:
    columns = (
        _PARAMETER,
        TableColumn("shape", TEXT, "", "as 64x32"),
        TableColumn("numel", INTEGER),
        TableColumn("dtype", TEXT),
        TableColumn("device", TEXT),
        TableColumn("requires_grad", TRUTH),
        TableColumn("module", TEXT),
        TableColumn("module_type", TEXT),
        TableColumn("group", TEXT, "", "optimizer/group, null where no optimizer holds it"),
        TableColumn("aliases", TEXT, "", "a JSON list of further names of the same tensor"),
        TableColumn("layout", TEXT, "", "whole, shard, replicate or partial"),
        TableColumn("unmeasured", TEXT, "", "why no gradient can be expected, else null"),
    )

    def rows() -> Iterator[tuple[Any, ...]]:
        for p in run.parameters():
            shape = "x".join(map(str, p.placement.global_shape or p.shape))
            yield (
                p.name, shape, p.numel, p.dtype, p.device, p.requires_grad, p.module, p.module_type,
                p.group or None, atomic_json.dump(list(p.aliases)), p.placement.layout.value,
                p.unmeasured or None,
            )  # fmt: skip

    return Table("parameters", "one row per parameter", columns, lambda _wanted: _listed(columns, rows()))


def _attempts(run: Run) -> Table:
    columns = (
        _ATTEMPT,
        TableColumn("step_offset", INTEGER, "step", "number of its first step"),
        TableColumn("status", TEXT),
        TableColumn("started", FLOAT, "s", "Unix time"),
        TableColumn("ended", FLOAT, "s", "Unix time, null where not known"),
        TableColumn("world_size", INTEGER),
        TableColumn("script", TEXT),
        TableColumn("arguments", TEXT, "", "a JSON list"),
    )

    def rows() -> Iterator[tuple[Any, ...]]:
        for a in run.attempts:
            arguments = atomic_json.dump(list(a.argv))
            yield (
                a.index, a.step_offset, a.status.value, a.started, a.ended, a.world_size, a.script, arguments
            )  # fmt: skip

    return Table(
        "attempts", "one row per start of the training", columns, lambda _wanted: _listed(columns, rows())
    )


def _spectra(run: Run) -> Table:
    kinds = {name: FLOAT for name in SPECTRA_FLOATS} | {name: TEXT for name in SPECTRA_TEXTS}
    columns = tuple(TableColumn(name, kinds.get(name, INTEGER)) for name in SPECTRA_COLUMNS)
    meaning = "one row per step, layer and direction of its spectrum"
    return Table("spectra", meaning, columns, lambda _wanted: spectra_chunks(run))


_EMPTY: dict[str, tuple[Any, Any]] = {
    INTEGER: (0, np.int64), FLOAT: (np.nan, np.float64), TEXT: ("", object), TRUTH: (False, np.bool_)
}  # fmt: skip


def _listed(columns: Sequence[TableColumn], rows: Iterator[tuple[Any, ...]]) -> Iterator[Chunk]:
    """Yield rows that are given as tuples, None where there is no value."""
    listed = list(rows)
    values: dict[str, npt.NDArray[Any]] = {}
    void: dict[str, npt.NDArray[np.bool_]] = {}
    for i, column in enumerate(columns):
        empty, kind = _EMPTY[column.kind]
        void[column.name] = np.array([row[i] is None for row in listed], dtype=bool)
        cells = [empty if row[i] is None else row[i] for row in listed]
        values[column.name] = np.empty(len(cells), dtype=kind)
        values[column.name][:] = [storable(cell) for cell in cells] if column.kind == TEXT else cells
    yield Chunk(values, void)
