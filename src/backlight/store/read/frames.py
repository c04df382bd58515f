"""Numbers of ranks, parameter tables and attempts as one: arrays of steps by parameters, and scalars.

Shapes: S steps, P parameters (the union over all tables, in model order), R ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from backlight.records import Layout, ParameterRecord, Placement
from backlight.series import SERIES, Join, SeriesSchema
from backlight.store.read.attempt_files import by_rank
from backlight.store.read.columnar import ColumnarDataset, ColumnarRank
from backlight.store.read.rank_file import Array, Block, Logged, Mask, RankFile, Steps, Window, latest


@dataclass(frozen=True, slots=True)
class Frame:
    """One column of a series: ``values[s, p]`` is void where ``measured[s, p]`` is False (NaN, or 0).

    ``any_rank`` marks what any rank measured, also where ranks do not form a whole; None for ``measured``.
    """

    steps: Steps
    names: tuple[str, ...]
    values: Array
    measured: Mask
    unit: str
    any_rank: Mask | None = None

    def incomplete(self) -> Mask:
        """Return where ranks measured parts that do not form a whole, ``[S, P]``."""
        return np.zeros_like(self.measured) if self.any_rank is None else self.any_rank & ~self.measured

    def followed_by(self, tail: Frame, first: int) -> Frame:
        """Return the steps of this frame before ``first``, and then ``tail``."""
        head = int(np.searchsorted(self.steps, first))
        pairs = ((self.steps, tail.steps), (self.values, tail.values), (self.measured, tail.measured))
        steps, values, measured = (np.concatenate([mine[:head], new]) for mine, new in pairs)
        any_rank = np.concatenate(
            [
                measured[:head] if self.any_rank is None else self.any_rank[:head],
                tail.measured if tail.any_rank is None else tail.any_rank,
            ]
        )
        one_rank = self.any_rank is None and tail.any_rank is None
        return Frame(steps, self.names, values, measured, self.unit, None if one_rank else any_rank)


RELATIVE_TOLERANCE = 1e-5
"""Relative difference up to which ranks that hold the same tensor have measured the same."""

COMPARED = {"gradient": "norm", "update": "weight_norm"}
"""The column by which ranks are compared, for every column of a series."""

OF_GRADIENTS = frozenset({"gradient", "histogram"})
"""Series that are placed as the gradients are; others as the parameters."""

Shards = dict[tuple[tuple[int, ...], ...], npt.NDArray[np.int64]]
"""Indices of parameters by groups of ranks, each of which holds one shard."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "rms": ("norm", "numel"),
    "mean": ("sum", "numel"),
    "non_finite": ("nan", "inf"),
    "zero_share": ("zeros", "numel"),
    "ratio": ("update_norm", "weight_norm"),
}


def needs(schema: SeriesSchema, column: str) -> tuple[str, ...]:
    """Return the stored columns from which ``column`` is computed."""
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
    """Merge lists of names: a name that is new in a later list goes next to its neighbour there.

    That is behind its predecessor, or before the first known name; a list without any known name goes to the
    end, as the stages of a pipeline do.
    """
    order: list[str] = []
    placed: set[str] = set()
    for table in tables:
        if not order:
            order = list(dict.fromkeys(table))
            placed = set(order)
            continue
        if all(name in placed for name in table):
            continue
        at = next((order.index(name) for name in table if name in placed), len(order))
        for name in table:
            if name in placed:
                at = order.index(name) + 1
            else:
                order.insert(at, name)
                placed.add(name)
                at += 1
    return tuple(order)


class Holders:
    """How each of the R ranks of an attempt holds each of ``names``, found once for all columns."""

    def __init__(self, records: Sequence[Mapping[str, ParameterRecord]], names: Sequence[str]) -> None:
        self.records = records
        self.names = names
        self._by_kind: dict[bool, Shards] = {}

    def shards(self, series: str) -> Shards:
        """Return the indices of parameters by the ranks that hold their shards: most are sharded equally."""
        kind = series in OF_GRADIENTS
        if kind not in self._by_kind:
            by_shards: dict[tuple[tuple[int, ...], ...], list[int]] = {}
            for p, name in enumerate(self.names):
                holders = [(r, records[name]) for r, records in enumerate(self.records) if name in records]
                if shards := _shards(holders, series):
                    by_shards.setdefault(tuple(map(tuple, shards)), []).append(p)
            self._by_kind[kind] = {shards: np.array(at, dtype=np.int64) for shards, at in by_shards.items()}
        return self._by_kind[kind]


def join_ranks(
    blocks: Sequence[Block], holders: Holders, series: str, positions: Sequence[Mapping[int, float]] = ()
) -> Block:
    """Join the blocks of R ranks: replicas count once, shards are joined as the schema says.

    A parameter is measured where the whole of it was: where every shard that is not empty was, all of
    them at the same position of the training (``positions``: backward passes by rank and step); and where
    ranks that hold the same tensor have measured the same. Norms of unreduced partial tensors do not give
    the norm of their sum, so such a parameter stays unmeasured.
    """
    if len(blocks) == 1 and not any(divided(record, series) for record in holders.records[0].values()):
        return blocks[0]
    schema = SERIES[series]
    steps = np.unique(np.concatenate([b.steps for b in blocks]))
    aligned = [_on(block, steps) for block in blocks]
    positions_RS = np.full((len(blocks), len(steps)), np.nan)
    for r, logged in enumerate(positions):
        positions_RS[r] = [logged.get(step, np.nan) for step in steps.tolist()]
    kinds = {name: next(c for c in schema.columns if c.name == name) for name in blocks[0].columns}
    S, P = len(steps), len(holders.names)
    measured, any_rank = np.zeros((S, P), dtype=bool), np.zeros((S, P), dtype=bool)
    for block in aligned:
        any_rank |= block.measured
    out: dict[str, Array] = {
        name: np.zeros((S, P), dtype=np.int64) if c.integer else np.full((S, P), np.nan)
        for name, c in kinds.items()
    }
    agreed = COMPARED.get(series)
    for shards, at_G in holders.shards(series).items():
        chosen = [
            _agreed([aligned[r] for r in shard], positions_RS[list(shard)], at_G, agreed) for shard in shards
        ]
        mask_SG = np.logical_and.reduce([mask for mask, _, _ in chosen])
        if len(shards) > 1:
            mask_SG &= _are_aligned([position for _, _, position in chosen])
        measured[:, at_G] = mask_SG
        for column, schema_column in kinds.items():
            joined = _join([columns[column] for _, columns, _ in chosen], schema_column.join)
            out[column][:, at_G] = np.where(mask_SG, joined, 0 if schema_column.integer else np.nan)
    return Block(steps, out, measured, any_rank)


def total(norms: Frame) -> Logged:
    """Return the norm over all parameters, each once, at the steps at which all of them are known."""
    norm_SP = np.where(norms.measured, norms.values, 0.0)
    complete = ~norms.incomplete().any(axis=1) & norms.measured.any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        # hypot returns infinity for (inf, NaN): NaN is restored.
        undefined = np.isnan(norm_SP).any(axis=1)
        total_S = np.where(undefined, np.nan, np.hypot.reduce(norm_SP, axis=1, initial=0.0))
    return norms.steps[complete], total_S[complete]


def join_attempts(blocks: Sequence[Block]) -> Block:
    """Concatenate attempts; where two hold a step, the later one counts."""
    if len(blocks) == 1:
        return blocks[0]
    whole = np.concatenate([b.steps for b in blocks])
    steps, at = np.unique(whole[::-1], return_index=True)
    rows = len(whole) - 1 - at
    # Blocks of several ranks also hold the compared column; one of a single process does not.
    names = [name for name in blocks[0].columns if all(name in b.columns for b in blocks)]
    return Block(
        steps,
        {name: np.concatenate([b.columns[name] for b in blocks])[rows] for name in names},
        np.concatenate([b.measured for b in blocks])[rows],
        np.concatenate([b.by_any_rank for b in blocks])[rows],
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
    """Return the placement of the numbers of a series about a parameter."""
    of_gradient = record.gradient if series in OF_GRADIENTS else None
    return record.placement if of_gradient is None else of_gradient


def divided(record: ParameterRecord, series: str) -> bool:
    """Return whether a rank holds only a part of a parameter, as far as a series is concerned."""
    return placement(record, series).layout in {Layout.SHARD, Layout.PARTIAL}


def _shards(holders: Sequence[tuple[int, ParameterRecord]], series: str) -> list[list[int]]:
    """Return groups of ranks that hold the same part; empty where the parts do not form the whole."""
    placed = [(r, placement(record, series)) for r, record in holders]
    if not placed or any(place.layout is Layout.PARTIAL for _, place in placed):
        return []
    sharded = [(r, place) for r, place in placed if place.layout is Layout.SHARD]
    if not sharded:
        is_same = len({record.shape for _, record in holders}) == 1
        return [[r for r, _ in placed]] if is_same else []
    if len(sharded) < len(placed):
        return []  # one rank holds the whole of what another one holds a part of
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for r, place in sharded:
        if 0 not in place.local_shape:
            groups.setdefault((place.offset, place.local_shape), []).append(r)
    covered = sum(math.prod(shape) for _, shape in groups)
    return list(groups.values()) if covered == math.prod(sharded[0][1].global_shape) else []


def _agreed(
    blocks: Sequence[Block], positions_RS: Array, at_G: npt.NDArray[np.int64], by: str | None
) -> tuple[Mask, dict[str, Array], Array]:
    """Return what ranks that hold the same tensor measured, ``[S, G]``, and their positions.

    The first that measured a step counts; a step at which another rank measured something else is not
    measured: gradients that nothing has reduced, or tensors that only share their name.
    """
    measured = blocks[0].measured[:, at_G]
    values = {name: column[:, at_G] for name, column in blocks[0].columns.items()}
    positions = np.broadcast_to(positions_RS[0][:, None], measured.shape)
    if len(blocks) > 1:
        positions = positions.copy()
    agree = np.ones_like(measured)
    for block, theirs in zip(blocks[1:], positions_RS[1:], strict=True):
        mask = block.measured[:, at_G]
        take = mask & ~measured
        for name, column in block.columns.items():
            other = column[:, at_G]
            if name == by or by not in block.columns:
                agree &= ~(mask & measured) | _same(values[name], other)
            values[name][take] = other[take]
        positions[take] = np.broadcast_to(theirs[:, None], take.shape)[take]
        measured |= take
    return measured & agree, values, positions


def _same(first: Array, second: Array) -> Mask:
    if first.dtype.kind != "f":
        return np.asarray(first == second)
    return np.isclose(first, second, rtol=RELATIVE_TOLERANCE, atol=0.0, equal_nan=True)


def _are_aligned(positions: Sequence[Array]) -> Mask:
    """Return where all parts, ``[S, G]`` each, were at the same position, as far as it was recorded."""
    highest = np.full(positions[0].shape, -np.inf)
    lowest = np.full(positions[0].shape, np.inf)
    for position in positions:  # one after the other: a stack of many ranks is larger than any cache
        np.fmax(highest, position, out=highest)  # ignores NaN, of a rank that recorded no position
        np.fmin(lowest, position, out=lowest)
    return np.asarray(highest <= lowest)  # also where no rank recorded any: -inf and inf


def _join(values: Sequence[Array], join: Join) -> Array:
    out = values[0].copy()
    if join in {Join.MAX, Join.SUM}:
        merge = np.maximum if join is Join.MAX else np.add
        with np.errstate(over="ignore", invalid="ignore"):  # a sum of numbers near the largest float
            for other in values[1:]:
                merge(out, other, out=out)
        return out
    # hypot instead of squares: a norm near the largest float must not overflow here.
    # hypot returns infinity for (inf, NaN); the norm of the whole is NaN there.
    undefined = np.isnan(out)
    with np.errstate(over="ignore", invalid="ignore"):
        for other in values[1:]:
            undefined |= np.isnan(other)
            np.hypot(out, other, out=out)
    out[undefined] = np.nan
    return out


MEANS = frozenset({"loss"})
"""Scalars of which each rank has its own share: the mean over ranks is that of the whole batch."""

FROM_TOTAL = frozenset({"total_norm", "clip/norm", "clip/factor"})
"""Scalars that follow from the joined gradients where several ranks hold parts of them."""

WINDOW_BYTES = 512 * 1024 * 1024
"""Columns of all ranks that are joined at once: for a thousand ranks, a few steps at a time."""

_EPSILON = 1e-6  # torch adds it to the norm before it divides by it


@dataclass(frozen=True, slots=True)
class Spread:
    """One number of each rank over global steps: ``values[s, r]`` is NaN where ``logged[s, r]`` is False."""

    ranks: tuple[int, ...]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    logged: npt.NDArray[np.bool_]
    unit: str

    def difference(self) -> npt.NDArray[np.float64]:
        """Return, by step, the largest less the smallest finite value; NaN where fewer than two are."""
        finite = np.isfinite(self.values)
        highest = np.where(finite, self.values, -np.inf).max(axis=1, initial=-np.inf)
        lowest = np.where(finite, self.values, np.inf).min(axis=1, initial=np.inf)
        return np.where(finite.sum(axis=1) > 1, highest - lowest, np.nan)

    def first_non_finite(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the first step at which a rank logged NaN or infinity, and the ranks that did; else None."""
        bad = ~np.isfinite(self.values) & self.logged
        rows = np.flatnonzero(bad.any(axis=1))
        if not len(rows):
            return None
        return int(self.steps[rows[0]]), tuple(self.ranks[r] for r in np.flatnonzero(bad[rows[0]]))


def block(
    files: Sequence[RankFile],
    series: str,
    columns: Sequence[str],
    names: Sequence[str],
    part: int,
    holders: Callable[[], Holders] | None,
    window: Window | None = None,
    after: Mapping[RankFile, int] = MappingProxyType({}),
) -> Block:
    """Return stored columns of one attempt over the parameters ``names``.

    Ranks are joined to a whole by what ``holders`` returns; with None what a rank holds stays as it is.
    ``window`` limits the steps; ``after`` holds a row of each file up to which nothing is in that window.
    """
    whole = _dataset_of(files) if holders is not None else None
    joined = None if whole is None else whole.joined(series, columns, names, part, window)
    if joined is not None:
        return joined
    ranks = by_rank(files)
    if holders is None or len(ranks) == 1:
        wanted, windows = list(columns), [window]
    else:
        wanted = list(dict.fromkeys((*columns, *([COMPARED[series]] if series in COMPARED else []))))
        windows = _windows(ranks, series, len(names) * 8 * (len(wanted) + 2), window, after)
    out = []
    for between in windows:
        blocks = [
            join_attempts([f.block(series, wanted, names, part, between, after.get(f, 0)) for f in mine])
            for mine in ranks.values()
        ]
        if holders is None:
            return join_attempts(blocks)
        positions = [ChainMap(*(f.positions for f in reversed(mine))) for mine in ranks.values()]
        out.append(join_ranks(blocks, holders(), series, positions if len(ranks) > 1 else []))
    return join_attempts(out)


def _dataset_of(files: Sequence[RankFile]) -> ColumnarDataset | None:
    """Return the dataset whose ranks all files are, None where there is none."""
    dataset = files[0].dataset if isinstance(files[0], ColumnarRank) else None
    if dataset is None or len(files) != len(dataset.index.ranks):
        return None
    return dataset if all(getattr(file, "dataset", None) is dataset for file in files) else None


def holders_of(files: Sequence[RankFile], names: Sequence[str]) -> Holders:
    """Return how each rank of one attempt holds each parameter."""
    return Holders([_records(mine) for mine in by_rank(files).values()], names)


def _windows(
    ranks: Mapping[int, Sequence[RankFile]],
    series: str,
    row_bytes: int,
    within: Window | None,
    after: Mapping[RankFile, int],
) -> list[Window | None]:
    """Return windows of steps in which the rows of all ranks fit into :data:`WINDOW_BYTES`."""
    rows = sum(f.last[f"series_{series}"] - after.get(f, 0) for mine in ranks.values() for f in mine)
    if rows * row_bytes <= WINDOW_BYTES:
        return [within]
    first, end = within or (-(2**62), 2**62)
    first_rank = next(iter(ranks.values()))
    steps = np.unique(np.concatenate([f.steps(series, after=after.get(f, 0)) for f in first_rank]))
    inside = steps[(steps >= first) & (steps < end)]
    count = -(-rows * row_bytes * len(inside) // (WINDOW_BYTES * max(1, len(steps))))
    cuts = sorted({int(part[0]) for part in np.array_split(inside, max(1, count)) if len(part)})
    return list(itertools.pairwise([first, *cuts[1:], end]))


def scalars(files: Sequence[RankFile], source: str, name: str) -> dict[int, Logged]:
    """Return the values of a scalar over global steps, by the ranks that logged it."""
    by_rank_logged = {
        rank: latest([file.scalar(source, name) for file in mine]) for rank, mine in by_rank(files).items()
    }
    return {rank: logged for rank, logged in by_rank_logged.items() if len(logged[0])}


def lowest(values: Mapping[int, Logged]) -> Logged:
    """Return, at each step, the value of the lowest rank that logged it."""
    return latest([values[rank] for rank in sorted(values, reverse=True)])


def mean(values: Mapping[int, Logged]) -> Logged:
    """Return, at each step, the mean over the ranks that logged it."""
    if len(values) < 2:
        return lowest(values)
    table = spread([values], "")
    with np.errstate(over="ignore", invalid="ignore"):  # a rank logged inf, another -inf
        total_S = np.where(table.logged, table.values, 0.0).sum(axis=1)
    return table.steps, total_S / table.logged.sum(axis=1)


def from_total(files: Sequence[RankFile], name: str, norms: Callable[[], Frame]) -> Logged:
    """Return one of :data:`FROM_TOTAL`, computed from the joined gradient norms that ``norms`` returns."""
    if name == "total_norm":
        return total(norms())
    stated = lowest(scalars(files, "backlight", name))
    by_total = lowest(scalars(files, "backlight", "clip/by_total"))
    if not len(by_total[0]):
        return stated
    limits = dict(zip(*lowest(scalars(files, "backlight", "clip/limit")), strict=True))
    steps, totals = total(norms())
    limited = np.isin(steps, by_total[0]) & np.isin(steps, list(limits))
    steps, totals = steps[limited], totals[limited]
    limits_S = np.array([limits[step] for step in steps])
    computed = totals if name == "clip/norm" else np.minimum(1.0, limits_S / (totals + _EPSILON))
    return latest([stated, (steps, computed)])


def alone(files: Sequence[RankFile]) -> bool:
    """Return whether one rank holds everything, so that its scalars of the whole are right."""
    ranks = by_rank(files)
    return len(ranks) == 1 and not any(divided(p, "gradient") for p in _records(files).values())


def spread(attempts: Sequence[Mapping[int, Logged]], unit: str) -> Spread:
    """Return the values of ranks as one table; where two attempts hold a step, the later one counts."""
    ranks = tuple(sorted({rank for values in attempts for rank in values}))
    taken = np.zeros(0, np.int64)
    kept: list[tuple[int, Steps, npt.NDArray[np.float64]]] = []
    for values in reversed(attempts):
        for rank, (steps, logged) in values.items():
            free = ~np.isin(steps, taken)
            kept.append((ranks.index(rank), steps[free], logged[free]))
        taken = np.unique(np.concatenate([taken, *(steps for steps, _ in values.values())]))
    table = np.full((len(taken), len(ranks)), np.nan)
    is_logged = np.zeros(table.shape, dtype=bool)
    for column, steps, logged in kept:
        rows = np.searchsorted(taken, steps)
        table[rows, column], is_logged[rows, column] = logged, True
    return Spread(ranks, taken, table, is_logged, unit)


def _records(files: Sequence[RankFile]) -> dict[str, ParameterRecord]:
    return {p.name: p for file in files for table in file.tables.values() for p in table}
