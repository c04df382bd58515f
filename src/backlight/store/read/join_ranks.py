"""Numbers that no rank has alone: columns and scalars joined over ranks, and how far ranks differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from backlight.records import ParameterRecord, RunStatus
from backlight.store.format.manifest import Progress
from backlight.store.read import frames
from backlight.store.read.attempt_files import AttemptFiles
from backlight.store.read.columnar import ColumnarDataset, ColumnarRank
from backlight.store.read.frames import COMPARED, Frame, Holders
from backlight.store.read.rank_file import Block, Logged, RankFile, Steps, Window, latest

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


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of an attempt, with the last global step that it took, recorded or not."""

    rank: int
    host: str
    status: RunStatus
    last_step: int
    ended: float | None


def states(opened: AttemptFiles) -> tuple[RankState, ...]:
    """Return how far each rank of an attempt came; a rank that left nothing is missing."""
    files = by_rank(opened.files)
    out = []
    for rank in sorted({*opened.progress, *files}):
        last = max((file.last_step for file in files.get(rank, ())), default=-1)
        progress = opened.progress.get(rank)
        if progress is None:
            out.append(RankState(rank, "", RunStatus.UNKNOWN, last, None))
            continue
        last = max(last, _stated_step(opened, progress))
        out.append(RankState(rank, progress.process.host, progress.status_now(), last, progress.ended))
    return tuple(out)


def last_step(opened: AttemptFiles) -> int:
    """Return the last global step that any rank of an attempt took, recorded or not; -1 for none."""
    recorded = [file.last_step for file in opened.files]
    stated = [_stated_step(opened, progress) for progress in opened.progress.values()]
    return max([*recorded, *stated], default=-1)


def _stated_step(opened: AttemptFiles, progress: Progress) -> int:
    """Return the last global step that a rank stated itself: with sampling, not the last recorded one."""
    return opened.entry.step_offset + progress.step if progress.step >= 0 else -1


def by_rank(files: Sequence[RankFile]) -> dict[int, list[RankFile]]:
    """Return the files of an attempt by rank: on some file systems a rank leaves several."""
    out: dict[int, list[RankFile]] = {}
    for file in files:
        out.setdefault(file.rank, []).append(file)
    return dict(sorted(out.items()))


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
            frames.join_attempts(
                [f.block(series, wanted, names, part, between, after.get(f, 0)) for f in mine]
            )
            for mine in ranks.values()
        ]
        if holders is None:
            return frames.join_attempts(blocks)
        positions = [_positions(mine) for mine in ranks.values()] if len(ranks) > 1 else []
        out.append(frames.join_ranks(blocks, holders(), series, positions))
    return frames.join_attempts(out)


def _dataset_of(files: Sequence[RankFile]) -> ColumnarDataset | None:
    """Return the dataset whose ranks all files are, None where there is none."""
    dataset = files[0].dataset if isinstance(files[0], ColumnarRank) else None
    if dataset is None or len(files) != len(dataset.index.ranks):
        return None
    return dataset if all(isinstance(f, ColumnarRank) and f.dataset is dataset for f in files) else None


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
    rows = sum(f.count(series, within, after.get(f, 0)) for mine in ranks.values() for f in mine)
    count = -(-rows * row_bytes // WINDOW_BYTES)
    if count <= 1:
        return [within]
    first, end = within or (-(2**62), 2**62)
    steps = np.unique(np.concatenate([file.steps(series) for file in next(iter(ranks.values()))]))
    steps = steps[(steps >= first) & (steps < end)]
    cuts = sorted({int(part[0]) for part in np.array_split(steps, count) if len(part)})
    return list(itertools.pairwise([first, *cuts[1:], end]))


def scalars(files: Sequence[RankFile], source: str, name: str) -> dict[int, Logged]:
    """Return the values of a scalar over global steps, by the ranks that logged it."""
    found = {
        rank: latest([file.scalar(source, name) for file in mine]) for rank, mine in by_rank(files).items()
    }
    return {rank: logged for rank, logged in found.items() if len(logged[0])}


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
        return frames.total(norms())
    stated = lowest(scalars(files, "backlight", name))
    by_total = lowest(scalars(files, "backlight", "clip/by_total"))
    if not len(by_total[0]):
        return stated
    limits = dict(zip(*lowest(scalars(files, "backlight", "clip/limit")), strict=True))
    steps, totals = frames.total(norms())
    known = np.isin(steps, by_total[0]) & np.isin(steps, list(limits))
    steps, totals = steps[known], totals[known]
    limits_S = np.array([limits[step] for step in steps])
    computed = totals if name == "clip/norm" else np.minimum(1.0, limits_S / (totals + _EPSILON))
    return latest([stated, (steps, computed)])


def alone(files: Sequence[RankFile]) -> bool:
    """Return whether one rank holds everything, so that its scalars of the whole are right."""
    ranks = by_rank(files)
    return len(ranks) == 1 and not any(frames.divided(p, "gradient") for p in _records(files).values())


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


def _positions(files: Sequence[RankFile]) -> dict[int, float]:
    return {step: value for file in files for step, value in file.positions.items()}
