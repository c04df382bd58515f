"""Numbers of many ranks, tables and attempts as one array of steps by parameters.

Shapes: S steps, P parameters (the union over all tables, in model order), R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Layout, ParameterRecord, Placement
from backlight.store.format.schema import SERIES, Join, SeriesSchema
from backlight.store.read.rank_file import RankFile

Array = npt.NDArray[Any]
Steps = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Frame:
    """One column of a series: ``values[s, p]`` is void where ``measured[s, p]`` is False (NaN, or 0).

    ``seen`` tells what any rank measured, also where ranks do not make up a whole; None for ``measured``.
    """

    steps: Steps
    names: tuple[str, ...]
    values: Array
    measured: Mask
    unit: str

    def to_pandas(self, *, wide: bool = True) -> Any:
        """Return it as ``pandas.DataFrame``: a column per parameter over steps, or one row for each value.

        What was not measured is null; the unit stands in ``attrs["units"]``.
        """
        from backlight.store.export import dataframes  # noqa: PLC0415 - pandas and pyarrow are not everybody's

        return dataframes.as_pandas(dataframes.frame_table(self, wide=wide), "step" if wide else None)

    def to_polars(self, *, wide: bool = True) -> Any:
        """Return it as ``polars.DataFrame``: ``step`` and a column per parameter, or a row for each value."""
        from backlight.store.export import dataframes  # noqa: PLC0415 - polars and pyarrow are not everybody's

        return dataframes.as_polars(dataframes.frame_table(self, wide=wide))

    seen: Mask | None = None

    def apart(self) -> Mask:
        """Return what ranks measured but what does not make up a whole, ``[S, P]``."""
        return np.zeros_like(self.measured) if self.seen is None else self.seen & ~self.measured


@dataclass(frozen=True, slots=True)
class Block:
    """Stored columns of one rank or of joined ranks, over the same steps and parameters.

    ``seen`` tells what any rank measured, also where that does not make a whole; None for ``measured``.
    """

    steps: Steps
    columns: Mapping[str, Array]
    measured: Mask
    seen: Mask | None = None


AGREE = 1e-5
"""Relative difference up to which ranks that hold the same have measured the same."""

AGREED = {"gradient": "norm", "update": "weight_norm"}
"""The column by which ranks are compared, whichever column is asked for."""

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


def rank_block(
    file: RankFile,
    series: str,
    columns: Sequence[str],
    names: Sequence[str],
    part: int,
    window: tuple[int, int] | None = None,
) -> Block:
    """Return the stored columns of one rank over the parameters ``names``, within a window of steps."""
    schema = SERIES[series]
    place = {name: i for i, name in enumerate(names)}
    wanted = list(dict.fromkeys((*columns, "measured")))
    stored = file.columns(series, wanted, part, window)
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
    positions: Sequence[Mapping[int, float]] = (),
) -> Block:
    """Join the blocks of R ranks: replicas count once, shards are joined as the schema says.

    A parameter is measured where the whole of it was: where every shard that is not empty was, all of them
    at the same place of the training; and where ranks that hold the same have measured the same. A sum of
    unreduced partial tensors says nothing of the norm of their sum, so such a parameter stays unmeasured.

    Parameters
    ----------
    blocks, records:
        What each rank measured, and how it holds each parameter.
    series, names:
        The series of the blocks, and their parameters.
    positions:
        By rank, the backward passes that it had seen up to a step: one that has skipped a step is at another
        place than the others at the same count of steps.
    """
    if len(blocks) == 1 and not any(divided(record, series) for record in records[0].values()):
        return blocks[0]
    schema = SERIES[series]
    steps = np.unique(np.concatenate([b.steps for b in blocks]))
    aligned = [_on(block, steps) for block in blocks]
    places_RS = np.full((len(blocks), len(steps)), np.nan)
    for r, places in enumerate(positions):
        places_RS[r] = [places.get(step, np.nan) for step in steps.tolist()]
    kinds = {name: next(c for c in schema.columns if c.name == name) for name in blocks[0].columns}
    S, P = len(steps), len(names)
    measured, seen = np.zeros((S, P), dtype=bool), np.zeros((S, P), dtype=bool)
    for block in aligned:
        seen |= block.measured
    out: dict[str, Array] = {
        name: np.zeros((S, P), dtype=np.int64) if c.integer else np.full((S, P), np.nan)
        for name, c in kinds.items()
    }
    agreed = AGREED.get(series)
    for shards, at_G in _alike_held(records, series, names).items():
        chosen = [
            _agreed([aligned[r] for r in shard], places_RS[list(shard)], at_G, agreed) for shard in shards
        ]
        mask_SG = np.logical_and.reduce([mask for mask, _, _ in chosen])
        if len(shards) > 1:
            mask_SG &= _together([places for _, _, places in chosen])
        measured[:, at_G] = mask_SG
        for column, schema_column in kinds.items():
            joined = _join([columns[column] for _, columns, _ in chosen], schema_column.join)
            out[column][:, at_G] = np.where(mask_SG, joined, 0 if schema_column.integer else np.nan)
    return Block(steps, out, measured, seen)


def total(joined: Block) -> dict[int, float]:
    """Return the norm over all parameters, each once, at the steps at which all of them are known."""
    norm_SP = np.where(joined.measured, joined.columns["norm"], 0.0)
    seen = joined.measured if joined.seen is None else joined.seen
    known = ~(seen & ~joined.measured).any(axis=1) & joined.measured.any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        # To hypot an infinity hides a NaN.
        undefined = np.isnan(norm_SP).any(axis=1)
        total_S = np.where(undefined, np.nan, np.hypot.reduce(norm_SP, axis=1, initial=0.0))
    return dict(zip(joined.steps[known].tolist(), total_S[known].tolist(), strict=True))


def join_attempts(blocks: Sequence[Block]) -> Block:
    """Put attempts one after the other; where two hold a step, the later one counts."""
    if len(blocks) == 1:
        return blocks[0]
    owner: dict[int, tuple[int, int]] = {}
    for i, block in enumerate(blocks):
        for row, step in enumerate(block.steps.tolist()):
            owner[step] = (i, row)
    order = sorted(owner)
    # Those of several ranks bring what tells whether they agree as well; one of a single process does not.
    names = [name for name in blocks[0].columns if all(name in b.columns for b in blocks)]
    starts = np.cumsum([0, *(len(b.steps) for b in blocks)])
    rows = np.array([starts[owner[s][0]] + owner[s][1] for s in order], dtype=np.int64)
    return Block(
        np.array(order, dtype=np.int64),
        {name: np.concatenate([b.columns[name] for b in blocks])[rows] for name in names},
        np.concatenate([b.measured for b in blocks])[rows],
        np.concatenate([b.measured if b.seen is None else b.seen for b in blocks])[rows],
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


def placement(record: ParameterRecord, series: str) -> Placement:
    """Return where the numbers of a series about a parameter sit in the whole."""
    of_gradient = series in {"gradient", "histogram"} and record.gradient is not None
    return record.gradient if of_gradient and record.gradient is not None else record.placement


def divided(record: ParameterRecord, series: str) -> bool:
    """Tell whether a rank holds a part of a parameter only, as far as a series is concerned."""
    layout = placement(record, series).layout
    return layout is Layout.SHARD or layout is Layout.PARTIAL


def _shards(holders: Sequence[tuple[int, ParameterRecord]], series: str) -> list[list[int]]:
    """Group ranks that hold the same part, where the parts make up the whole; nothing where they do not."""
    placed = [(r, placement(record, series)) for r, record in holders]
    if not placed or any(place.layout is Layout.PARTIAL for _, place in placed):
        return []
    sharded = [(r, place) for r, place in placed if place.layout is Layout.SHARD]
    if not sharded:
        alike = len({record.shape for _, record in holders}) == 1
        return [[r for r, _ in placed]] if alike else []
    if len(sharded) < len(placed):
        return []  # one rank holds the whole of what another one holds a part of
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for r, place in sharded:
        if 0 not in place.local_shape:
            groups.setdefault((place.offset, place.local_shape), []).append(r)
    held = sum(math.prod(shape) for _, shape in groups)
    return list(groups.values()) if held == math.prod(sharded[0][1].global_shape) else []


def _alike_held(
    records: Sequence[Mapping[str, ParameterRecord]], series: str, names: Sequence[str]
) -> dict[tuple[tuple[int, ...], ...], npt.NDArray[np.int64]]:
    """Return the places of parameters by who holds which of their parts: most are held alike."""
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for p, name in enumerate(names):
        holders = [(r, known[name]) for r, known in enumerate(records) if name in known]
        if shards := _shards(holders, series):
            found.setdefault(tuple(map(tuple, shards)), []).append(p)
    return {shards: np.array(at, dtype=np.int64) for shards, at in found.items()}


def _agreed(
    blocks: Sequence[Block], places_RS: Array, at_G: npt.NDArray[np.int64], by: str | None
) -> tuple[Mask, dict[str, Array], Array]:
    """Return what ranks that hold the same have measured ``[S, G]``, and at which places of the training.

    The first that measured a step counts; a step at which another one has measured something else is not
    measured: gradients that nothing has reduced, or tensors that only share their name.
    """
    measured = blocks[0].measured[:, at_G]
    values = {name: column[:, at_G] for name, column in blocks[0].columns.items()}
    places = np.broadcast_to(places_RS[0][:, None], measured.shape)
    if len(blocks) > 1:
        places = places.copy()
    agree = np.ones_like(measured)
    for block, theirs in zip(blocks[1:], places_RS[1:], strict=True):
        mask = block.measured[:, at_G]
        take = mask & ~measured
        for name, column in block.columns.items():
            other = column[:, at_G]
            if name == by or by not in block.columns:
                agree &= ~(mask & measured) | _same(values[name], other)
            values[name][take] = other[take]
        places[take] = np.broadcast_to(theirs[:, None], take.shape)[take]
        measured |= take
    return measured & agree, values, places


def _same(one: Array, other: Array) -> Mask:
    if one.dtype.kind != "f":
        return np.asarray(one == other)
    return np.isclose(one, other, rtol=AGREE, atol=0.0, equal_nan=True)


def _together(places: Sequence[Array]) -> Mask:
    """Tell where all parts, ``[S, G]`` each, were at the same place, as far as their ranks have said."""
    highest = np.full(places[0].shape, -np.inf)
    lowest = np.full(places[0].shape, np.inf)
    for place in places:  # one after the other: a stack of many ranks is larger than any cache
        np.fmax(highest, place, out=highest)  # a NaN, of a rank that has not said it, counts for nothing
        np.fmin(lowest, place, out=lowest)
    return np.asarray(highest <= lowest)  # also where nobody has said any: -inf and inf


def _join(values: Sequence[Array], join: Join) -> Array:
    out = values[0].copy()
    if join in {Join.MAX, Join.SUM}:
        merge = np.maximum if join is Join.MAX else np.add
        for other in values[1:]:
            merge(out, other, out=out)
        return out
    # hypot instead of squares: a norm near the largest float must not become infinite here.
    # To hypot an infinity hides a NaN; to the norm of the whole it does not.
    undefined = np.isnan(out)
    with np.errstate(over="ignore", invalid="ignore"):
        for other in values[1:]:
            undefined |= np.isnan(other)
            np.hypot(out, other, out=out)
    out[undefined] = np.nan
    return out
