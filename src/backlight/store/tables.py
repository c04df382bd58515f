"""A run as tables for databases, data frames and files: names, columns with units, rows in chunks.

What was not measured is void, never a number; NaN that was measured is NaN. A table is read when its rows are
asked for, and only the requested columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight import codec
from backlight.records import Finding
from backlight.series import SERIES, SeriesSchema
from backlight.store import spectra
from backlight.store.errors import ExportError
from backlight.store.format.names import storable
from backlight.store.format.schema import unit_of_scalar
from backlight.store.read.run import Run
from backlight.store.spectra import FIELDS, LAYER, NUMBERS, Layer, Measurement, SpectraTable

CHUNK_ROWS = 250_000
"""Rows of a long table that are in memory at a time."""

INTEGER, FLOAT, TEXT, BOOLEAN = "integer", "float", "text", "boolean"


Chunk = dict[str, npt.NDArray[Any]]
"""Some rows: columns of equal length, as masked arrays where some have no value."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column; ``kind`` is integer, float, text or boolean."""

    name: str
    kind: str
    unit: str = ""
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table of a run; ``chunks(wanted)`` yields its rows with at least the wanted columns."""

    name: str
    meaning: str
    columns: tuple[TableColumn, ...]
    chunks: Callable[[Collection[str]], Iterator[Chunk]]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(column.name for column in self.columns)


Fields = Mapping[TableColumn, str | Callable[[Any], Any]]
"""Columns with the attribute of a record, or the function of it, that gives their cell; None for no value."""

_STEP = TableColumn("step", INTEGER, "step", "optimizer step over all attempts")
_ATTEMPT = TableColumn("attempt", INTEGER, "", "number of the start of the run")
_PARAMETER = TableColumn("parameter", TEXT, "", "name of the parameter")
_RANK = TableColumn("rank", INTEGER, "", "rank that recorded it")
_MEASURED = TableColumn("measured", BOOLEAN, "", "whether it was; else the numbers are null")


def tables_of(run: Run, findings: Callable[[], Sequence[Finding]] | None = None) -> dict[str, StoredTable]:
    """Return the tables of a run by name, with the stored findings unless ``findings`` returns others."""
    tables = [_series_table(run, schema) for name, schema in SERIES.items() if run.has(name)]
    tables += [_steps_table(run), scalars_table(run), _events_table(run)]
    tables += [findings_table(findings or run.stored_findings), _parameters_table(run), _attempts_table(run)]
    if run.events(LAYER):
        tables.append(spectra_table(run))
    return {table.name: table for table in tables}


_LONG: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{
            name: ("gradient", name)
            for name in ("norm", "rms", "mean", "max_abs", "zeros", "nan", "inf", "numel")
        },
        "update_norm": ("update", "update_norm"),
        "weight_norm": ("update", "weight_norm"),
        "update_ratio": ("update", "ratio"),
    }
)
"""Columns of the long table of parameters, with their series."""


def _series_column(schema: SeriesSchema, column: str, name: str) -> TableColumn:
    for stored in schema.columns:
        if stored.name == column:
            return TableColumn(name, INTEGER if stored.integer else FLOAT, stored.unit, stored.meaning)
    derived = next(d for d in schema.derived if d.name == column)
    # A sum of counts is the one derived column of whole numbers.
    return TableColumn(name, INTEGER if column == "non_finite" else FLOAT, derived.unit, derived.meaning)


def _masked(values: npt.NDArray[Any], void: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    masked: npt.NDArray[Any] = np.ma.MaskedArray(values, void)
    return masked


def long_table(run: Run) -> StoredTable:
    """Return gradients and updates in one table: a row per attempt, step and parameter."""
    about = "one row per attempt, step and parameter; measured is that of the gradient"
    values = [_series_column(SERIES[series], column, name) for name, (series, column) in _LONG.items()]
    columns = (_STEP, _ATTEMPT, _PARAMETER, _MEASURED, *values)
    return StoredTable("long", about, columns, lambda wanted: _series_chunks(run, _LONG, wanted, "norm"))


def _series_table(run: Run, schema: SeriesSchema) -> StoredTable:
    names = [c.name for c in schema.columns if c.name != "measured"] + [d.name for d in schema.derived]
    of = {name: (schema.name, name) for name in ("measured", *names)}
    values = [_series_column(schema, name, name) for name in names]
    columns = (_STEP, _ATTEMPT, _PARAMETER, _MEASURED, *values)
    meaning = f"one row per step and parameter of the series {schema.name}"
    return StoredTable(schema.name, meaning, columns, lambda wanted: _series_chunks(run, of, wanted))


def _series_chunks(
    run: Run, columns: Mapping[str, tuple[str, str]], wanted: Collection[str], measured_by: str = ""
) -> Iterator[Chunk]:
    """Yield rows by attempt, step and parameter, in model order; ``measured`` is that of one column."""
    names = np.array([storable(p.name) for p in run.parameters()], dtype=object)
    P = len(names)
    chosen = [name for name in columns if name != "measured" and (name in wanted or name == measured_by)]
    chosen = chosen or ["measured"]
    measured_by = measured_by or chosen[0]
    for attempt in run.attempts:
        frames = {name: run.frame(*columns[name], attempt=attempt.index) for name in chosen}
        steps = np.unique(np.concatenate([frame.steps for frame in frames.values()]))
        rows_each = max(1, CHUNK_ROWS // max(P, 1))
        for start in range(0, len(steps) if P else 0, rows_each):
            here = steps[start : start + rows_each]
            S = len(here)
            out: Chunk = {
                "step": np.repeat(here, P),
                "attempt": np.full(S * P, attempt.index, dtype=np.int64),
                "parameter": np.tile(names, S),
            }
            for name, frame in frames.items():
                first, last = np.searchsorted(frame.steps, [here[0], here[-1] + 1])
                at = np.searchsorted(here, frame.steps[first:last])
                values, measured = np.zeros((S, P), frame.values.dtype), np.zeros((S, P), dtype=bool)
                values[at], measured[at] = frame.values[first:last], frame.measured[first:last]
                out[name] = _masked(values.reshape(-1), ~measured.reshape(-1))
            out["measured"] = ~np.ma.getmaskarray(out[measured_by])
            yield out


def _steps_table(run: Run) -> StoredTable:
    sources = {name: ("backlight", name) for name in run.scalar_names("backlight")}
    sources |= {f"user/{name}": ("user", name) for name in run.scalar_names("user")}

    def chunks(wanted: Collection[str]) -> Iterator[Chunk]:
        scalars = {name: run.scalar(of, source) for name, (source, of) in sources.items()}
        logged = [scalar.steps for scalar in scalars.values()]
        steps = np.unique(np.concatenate(logged)) if logged else np.zeros(0, dtype=np.int64)
        columns: Chunk = {"step": steps}
        for name, scalar in scalars.items():
            if name in wanted:
                values, void = np.full(len(steps), np.nan), np.ones(len(steps), dtype=bool)
                at = np.searchsorted(steps, scalar.steps)
                values[at], void[at] = scalar.values, False
                columns[name] = _masked(values, void)
        yield columns

    scalar_columns = [
        TableColumn(storable(name), FLOAT, unit_of_scalar(of, source))
        for name, (source, of) in sources.items()
    ]
    meaning = "one row per step, a column per scalar; a later attempt counts"
    return StoredTable("steps", meaning, (_STEP, *scalar_columns), chunks)


def scalars_table(run: Run) -> StoredTable:
    """Return the scalars: a row per attempt, step and scalar."""
    columns = (
        _STEP,
        _ATTEMPT,
        TableColumn("source", TEXT, "", "backlight or user"),
        TableColumn("name", TEXT),
        TableColumn("value", FLOAT, "", "in the unit of its row"),
        TableColumn("unit", TEXT),
    )

    def chunks(_wanted: Collection[str]) -> Iterator[Chunk]:
        for attempt in run.attempts:
            for source in ("backlight", "user"):
                for name in run.scalar_names(source):
                    scalar = run.scalar(name, source, attempt=attempt.index)
                    S = len(scalar.steps)
                    yield {
                        "step": scalar.steps,
                        "attempt": np.full(S, attempt.index, dtype=np.int64),
                        "source": np.full(S, source, dtype=object),
                        "name": np.full(S, storable(name), dtype=object),
                        "value": scalar.values,
                        "unit": np.full(S, scalar.unit, dtype=object),
                    }

    return StoredTable("scalars", "one row per attempt, step and scalar", columns, chunks)


def _events_table(run: Run) -> StoredTable:
    columns: Fields = {
        _STEP: "step",
        _ATTEMPT: "attempt",
        _RANK: "rank",
        TableColumn("time", FLOAT, "s", "Unix time"): "time",
        TableColumn("kind", TEXT): "kind",
        TableColumn("payload", TEXT, "", "a JSON object"): "payload",
    }
    return _listed("events", "one row per event", columns, run.events)


def findings_table(findings: Callable[[], Sequence[Finding]]) -> StoredTable:
    """Return the table of the findings that ``findings`` returns when its rows are read."""
    columns: Fields = {
        TableColumn("rule", TEXT): "rule",
        TableColumn("severity", TEXT, "", "info, warning or error"): "severity",
        TableColumn("monitor", TEXT): "monitor",
        TableColumn("title", TEXT): "title",
        TableColumn("detail", TEXT): "detail",
        _PARAMETER: "subject.parameter",
        TableColumn("module", TEXT): "subject.module",
        _STEP: "subject.step",
        _RANK: "subject.rank",
        TableColumn("line", TEXT): "subject.line",
        TableColumn("verdict", TEXT): "subject.verdict",
        TableColumn("phase", TEXT): "subject.phase",
        TableColumn("evidence", TEXT, "", "a JSON list"): "evidence",
        TableColumn("fix", TEXT): "fix",
        TableColumn("refuted_if", TEXT): "refuted_if",
        TableColumn("version", INTEGER, "", "of the rule"): "version",
        TableColumn("made", TEXT, "", "live or by a reader"): "made",
    }
    return _listed("findings", "one row per finding", columns, findings)


def _parameters_table(run: Run) -> StoredTable:
    columns: Fields = {
        _PARAMETER: "name",
        TableColumn("shape", TEXT, "", "as 64x32"): lambda p: "x".join(
            map(str, p.placement.global_shape or p.shape)
        ),
        TableColumn("numel", INTEGER): "numel",
        TableColumn("dtype", TEXT): "dtype",
        TableColumn("device", TEXT): "device",
        TableColumn("requires_grad", BOOLEAN): "requires_grad",
        TableColumn("module", TEXT): "module",
        TableColumn("module_type", TEXT): "module_type",
        TableColumn("group", TEXT, "", "optimizer/group, null where no optimizer holds it"): lambda p: (
            p.group or None
        ),
        TableColumn("aliases", TEXT, "", "a JSON list of further names of the same tensor"): "aliases",
        TableColumn("layout", TEXT, "", "whole, shard, replicate or partial"): "placement.layout",
        TableColumn("unmeasured", TEXT, "", "why no gradient can be expected, else null"): lambda p: (
            p.unmeasured or None
        ),
    }
    return _listed("parameters", "one row per parameter", columns, run.parameters)


def _attempts_table(run: Run) -> StoredTable:
    columns: Fields = {
        _ATTEMPT: "index",
        TableColumn("step_offset", INTEGER, "step", "number of its first step"): "step_offset",
        TableColumn("status", TEXT): "status",
        TableColumn("started", FLOAT, "s", "Unix time"): "started",
        TableColumn("ended", FLOAT, "s", "Unix time, null where not known"): "ended",
        TableColumn("world_size", INTEGER): "world_size",
        TableColumn("script", TEXT): "script",
        TableColumn("arguments", TEXT, "", "a JSON list"): "argv",
    }
    return _listed("attempts", "one row per start of the run", columns, lambda: run.attempts)


_DIRECTION_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        **{f"singular_value{end}": f"singular_value{end}" for end in ("", "_low", "_high")},
        **{f"spectral_echo{end}": f"echo{end}" for end in ("", "_low", "_high", "_null")},
        **{name: name for name in ("left_alignment", "right_alignment")},
        **{f"unbiased{end}": f"unbiased{end}" for end in ("", "_low", "_high")},
        **{name: name for name in ("residual", "block_echo", "shrunk")},
    }
)
"""Columns with a number per direction, by their field of :data:`backlight.store.spectra.FIELDS`."""

_LAYER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        **{f"stable_rank_{of}": f"stable_rank_{of}" for of in ("weight", "gradient", "update", "momentum")},
        "noise_sigma": "noise_sigma",
        "noise_edge": "edge",
        **{name: name for name in ("signal_share", "noise_scale", "aspect_ratio", "batch")},
    }
)
_LAYER_COUNTS = ("replicates", "identifiable")


def spectra_table(run: Run, max_directions: int | None = None) -> StoredTable:
    """Return the spectra: a row per step, layer and direction, with the numbers of the layer in each."""
    if max_directions is not None and max_directions < 1:
        raise ExportError(f"--max-directions must be at least 1, got {max_directions}")
    if not spectra.layers(run):
        raise ExportError(f"{run.path}: holds no spectra, so there are no rows of them; export parameters")

    def chunks(_wanted: Collection[str]) -> Iterator[Chunk]:
        for layer in spectra.layers(run):
            by_step = {t.measurement.step: t for t in spectra.tables(run, layer.parameter)}
            for measurement in spectra.measurements(run, layer.parameter):
                yield _spectrum_rows(layer, measurement, by_step.get(measurement.step), max_directions)

    columns = (
        _STEP,
        _PARAMETER,
        TableColumn("layer", TEXT, "", "module that the parameter belongs to"),
        TableColumn("shape", TEXT, "", "as 64x32"),
        TableColumn("direction", INTEGER, "", "from 0, the strongest first"),
        *(TableColumn(name, FLOAT, FIELDS[field]) for name, field in _DIRECTION_COLUMNS.items()),
        *(TableColumn(name, FLOAT, NUMBERS[number]) for name, number in _LAYER_COLUMNS.items()),
        *(TableColumn(name, INTEGER, NUMBERS[name]) for name in _LAYER_COUNTS),
    )
    return StoredTable("spectra", "one row per step, layer and direction of its spectrum", columns, chunks)


def _spectrum_rows(layer: Layer, at: Measurement, spectrum: SpectraTable | None, most: int | None) -> Chunk:
    D = 0
    if spectrum is not None:
        measured = np.flatnonzero(~np.isnan(spectrum["singular_value"]) | ~np.isnan(spectrum["echo"]))
        D = int(measured[-1]) + 1 if measured.size else 0
        D = D if most is None else min(D, most)
    N = max(1, D)

    def numbers(values: npt.NDArray[Any] | float) -> npt.NDArray[Any]:
        column = np.full(N, values)
        return _masked(column, np.isnan(column))

    columns: Chunk = {
        "step": np.full(N, at.step, dtype=np.int64),
        "parameter": np.full(N, storable(layer.parameter), dtype=object),
        "layer": np.full(N, storable(layer.layer), dtype=object),
        "shape": np.full(N, "x".join(map(str, layer.shape)), dtype=object),
        "direction": _masked(np.arange(N, dtype=np.int64), np.full(N, D == 0)),
    }
    for name, field in _DIRECTION_COLUMNS.items():
        columns[name] = numbers(spectrum[field][:N] if spectrum is not None and D else np.nan)
    for name, number in _LAYER_COLUMNS.items():
        columns[name] = numbers(at[number])
    for name in _LAYER_COUNTS:
        missing = bool(np.isnan(at[name]))
        count = np.full(N, 0 if missing else int(at[name]), dtype=np.int64)
        columns[name] = _masked(count, np.full(N, missing))
    return columns


_EMPTY: dict[str, tuple[Any, Any]] = {
    INTEGER: (0, np.int64), FLOAT: (np.nan, np.float64), TEXT: ("", object), BOOLEAN: (False, np.bool_)
}  # fmt: skip


def _listed(name: str, meaning: str, columns: Fields, rows: Callable[[], Iterable[Any]]) -> StoredTable:
    """Return a table of one chunk with a row for each record that ``rows`` returns."""

    def chunks(wanted: Collection[str]) -> Iterator[Chunk]:
        records = list(rows())
        out: Chunk = {}
        for column, of in columns.items():
            if column.name in wanted:
                cells = list(map(operator.attrgetter(of) if isinstance(of, str) else of, records))
                empty, kind = _EMPTY[column.kind]
                values = np.empty(len(cells), dtype=kind)
                full = [empty if cell is None else cell for cell in cells]
                values[:] = [_text(cell) for cell in full] if column.kind == TEXT else full
                out[column.name] = _masked(values, np.array([cell is None for cell in cells], dtype=bool))
        yield out

    return StoredTable(name, meaning, tuple(columns), chunks)


def _text(value: Any) -> str:
    return storable(value) if isinstance(value, str) else codec.encode(value)
