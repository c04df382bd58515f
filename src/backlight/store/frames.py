"""Numbers of many ranks, tables and attempts as one array of steps by parameters.

Shapes: S steps, P parameters (the union over all tables, in model order), R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Layout, ParameterRecord
from backlight.store.ranks import RankFile
from backlight.store.schema import SERIES, Join, SeriesSchema

Array = npt.NDArray[Any]
Steps = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Frame:
    """One column of a series: ``values[s, p]`` is void where ``measured[s, p]`` is False (NaN, or 0)."""

    steps: Steps
    names: tuple[str, ...]
    values: Array
    measured: Mask
    unit: str


@dataclass(frozen=True, slots=True)
class Block:
    """Stored columns of one rank or of joined ranks, over the same steps and parameters."""

    steps: Steps
    columns: Mapping[str, Array]
    measured: Mask


_NEEDS: dict[str, tuple[str, ...]] = {
    "rms": ("norm", "numel"),
    "mean": ("sum", "numel"),
    "non_finite": ("nan", "inf"),
    "zero_share": ("zeros", "numel"),
    "ratio": ("update_norm", "weight_norm"),
}


def needs(schema: SeriesSchema, column: str) -> tuple[str, ...]:
    """Return the stored columns from which ``column`` is made."""
    stored = {c.name for c in schema.columns}
    return (column,) if column in stored else _NEEDS[column]


def unit(schema: SeriesSchema, column: str) -> str | None:
    """Return the unit of a stored or derived column, None where the series has no such column."""
    units = {c.name: c.unit for c in schema.columns} | {d.name: d.unit for d in schema.derived}
    return units.get(column)


def derive(column: str, columns: Mapping[str, Array]) -> Array:
    """Compute a column from the joined stored ones; a division by nothing gives NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if column in columns:
            return columns[column]
        if column == "rms":
            return np.asarray(columns["norm"] / np.sqrt(columns["numel"].astype(np.float64)))
        if column == "non_finite":
            return np.asarray(columns["nan"] + columns["inf"])
        above, below = (columns[name] for name in _NEEDS[column])
        return np.asarray(above / below.astype(np.float64))


def model_order(tables: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Unify lists of names: a name that is new in a later list goes beside its neighbour there.

    That is behind its predecessor, or before the first known name; a list without any known name
    goes to the end, as the stages of a pipeline do.
    """
    order: list[str] = []
    known: set[str] = set()
    for table in tables:
        if not order:
            order = list(dict.fromkeys(table))
            known = set(order)
            continue
        if all(name in known for name in table):
            continue
        at = next((order.index(name) for name in table if name in known), len(order))
        for name in table:
            if name in known:
                at = order.index(name) + 1
            else:
                order.insert(at, name)
                known.add(name)
                at += 1
    return tuple(order)


def rank_block(file: RankFile, series: str, columns: Sequence[str], names: Sequence[str], part: int) -> Block:
    """Return the stored columns of one rank over the parameters ``names``."""
    schema = SERIES[series]
    place = {name: i for i, name in enumerate(names)}
    wanted = list(dict.fromkeys((*columns, "measured")))
    stored = file.columns(series, wanted, part)
    S, P = len(stored.steps), len(names)
    out: dict[str, Array] = {}
    for name in wanted:
        kind = np.int64 if name in schema.integers else np.float64
        out[name] = np.zeros((S, P), dtype=kind)
    for table in dict.fromkeys(stored.tables.tolist()):
        at_P = np.array([place[p.name] for p in file.tables()[table]], dtype=np.int64)
        whole = len(at_P) == P and bool((at_P == np.arange(P)).all())
        rows_S = np.flatnonzero(stored.tables == table)
        for name in wanted:
            if whole and len(rows_S) == S:
                out[name] = stored.values[table, name]
            else:
                out[name][np.ix_(rows_S, at_P)] = stored.values[table, name]
    measured = out["measured"] != 0
    if not measured.all():
        for name in columns:
            out[name][~measured] = 0 if name in schema.integers else np.nan
    return Block(stored.steps, {name: out[name] for name in columns}, measured)


def join_ranks(
    blocks: Sequence[Block],
    records: Sequence[Mapping[str, ParameterRecord]],
    series: str,
    names: Sequence[str],
) -> Block:
    """Join the blocks of R ranks: replicas count once, shards are joined as the schema says.

    A sharded parameter is measured where every shard that is not empty was; a sum of unreduced
    partial tensors says nothing of the norm of their sum, so such a parameter stays unmeasured.
    """
    if len(blocks) == 1:
        return blocks[0]
    schema = SERIES[series]
    steps = np.unique(np.concatenate([b.steps for b in blocks]))
    aligned = [_on(block, steps) for block in blocks]
    kinds = {name: next(c for c in schema.columns if c.name == name) for name in blocks[0].columns}
    S, P = len(steps), len(names)
    measured = np.zeros((S, P), dtype=bool)
    out: dict[str, Array] = {
        name: np.zeros((S, P), dtype=np.int64) if c.integer else np.full((S, P), np.nan)
        for name, c in kinds.items()
    }
    for p, name in enumerate(names):
        holders = [r for r in range(len(blocks)) if name in records[r]]
        shards = _shards([(r, records[r][name]) for r in holders])
        if not shards:
            continue
        chosen = [_first_measured([aligned[r] for r in shard], p) for shard in shards]
        measured[:, p] = np.logical_and.reduce([mask for mask, _ in chosen])
        for column, schema_column in kinds.items():
            values = np.stack([columns[column] for _, columns in chosen])
            joined = _join(values, schema_column.join)
            out[column][:, p] = np.where(measured[:, p], joined, 0 if schema_column.integer else np.nan)
    return Block(steps, out, measured)


def join_attempts(blocks: Sequence[Block]) -> Block:
    """Put attempts one after the other; where two hold a step, the later one counts."""
    if len(blocks) == 1:
        return blocks[0]
    owner: dict[int, tuple[int, int]] = {}
    for i, block in enumerate(blocks):
        for row, step in enumerate(block.steps.tolist()):
            owner[step] = (i, row)
    order = sorted(owner)
    starts = np.cumsum([0, *(len(b.steps) for b in blocks)])
    rows = np.array([starts[owner[s][0]] + owner[s][1] for s in order], dtype=np.int64)
    return Block(
        np.array(order, dtype=np.int64),
        {name: np.concatenate([b.columns[name] for b in blocks])[rows] for name in blocks[0].columns},
        np.concatenate([b.measured for b in blocks])[rows],
    )


def _on(block: Block, steps: Steps) -> Block:
    at = np.searchsorted(steps, block.steps)
    P = block.measured.shape[1]
    measured = np.zeros((len(steps), P), dtype=bool)
    measured[at] = block.measured
    columns = {}
    for name, values in block.columns.items():
        fill = np.nan if values.dtype.kind == "f" else 0
        columns[name] = np.full((len(steps), P), fill, dtype=values.dtype)
        columns[name][at] = values
    return Block(steps, columns, measured)


def _shards(holders: Sequence[tuple[int, ParameterRecord]]) -> list[list[int]]:
    """Group ranks that hold the same part; one group where nothing is sharded."""
    if any(record.placement.layout is Layout.PARTIAL for _, record in holders):
        return []
    sharded = [(r, rec) for r, rec in holders if rec.placement.layout is Layout.SHARD]
    if not sharded:
        return [[r for r, _ in holders]] if holders else []
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for r, record in sharded:
        if 0 not in record.placement.local_shape:
            groups.setdefault((record.placement.offset, record.placement.local_shape), []).append(r)
    return list(groups.values())


def _first_measured(blocks: Sequence[Block], p: int) -> tuple[Mask, dict[str, Array]]:
    measured = blocks[0].measured[:, p].copy()
    values = {name: column[:, p].copy() for name, column in blocks[0].columns.items()}
    for block in blocks[1:]:
        take = block.measured[:, p] & ~measured
        if take.any():
            for name, column in block.columns.items():
                values[name][take] = column[take, p]
            measured |= take
    return measured, values


def _join(values_RS: Array, join: Join) -> Array:
    if join is Join.MAX:
        return np.asarray(np.maximum.reduce(values_RS))
    if join is Join.SUM:
        return np.asarray(np.add.reduce(values_RS))
    # hypot instead of squares: a norm near the largest float must not become infinite here.
    # To hypot an infinity hides a NaN; to the norm of the whole it does not.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(values_RS).any(axis=0), np.nan, np.hypot.reduce(values_RS))
