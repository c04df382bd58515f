"""Numbers that no rank has alone: columns and scalars joined over ranks, and how far ranks differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backlight.records import ParameterRecord, RunStatus
from backlight.store.read import frames
from backlight.store.read.attempt_files import AttemptFiles
from backlight.store.read.frames import COMPARED, Block
from backlight.store.read.rank_file import RankFile

Values = dict[int, float]

MEANS = frozenset({"loss"})
"""Scalars of which each rank has its own share: the mean over ranks is that of the whole batch."""

FROM_TOTAL = frozenset({"total_norm", "clip/norm", "clip/factor"})
"""Scalars that follow from the joined gradients where several ranks hold parts of them."""

WINDOW_BYTES = 512 * 1024 * 1024
"""Columns of all ranks that are joined at once: for a thousand ranks, a few steps at a time."""

_EPSILON = 1e-6  # torch adds it to the norm before it divides by it


@dataclass(frozen=True, slots=True)
class Spread:
    """One number of each rank over global steps.

    Attributes
    ----------
    ranks, steps:
        Ranks that logged it at all, and steps at which any did.
    values, logged:
        ``values[s, r]`` is what rank r logged at step s, NaN where ``logged[s, r]`` is False.
    unit:
        The unit of the values.
    """

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
        several = finite.sum(axis=1) > 1
        out = np.full(len(several), np.nan)
        out[several] = highest[several] - lowest[several]
        return out

    def first_non_finite(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the first step at which a rank logged NaN or infinity, and the ranks that did; else None."""
        bad = ~np.isfinite(self.values) & self.logged
        rows = np.flatnonzero(bad.any(axis=1))
        if not len(rows):
            return None
        return int(self.steps[rows[0]]), tuple(self.ranks[r] for r in np.flatnonzero(bad[rows[0]]))


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of an attempt: ``last_step`` is the last global step with readable rows, or -1.

    ``ended`` is None where the end is not known; ``step`` is the last step that the rank itself stated.
    """

    rank: int
    host: str
    status: RunStatus
    last_step: int
    step: int
    ended: float | None


def states(opened: AttemptFiles) -> tuple[RankState, ...]:
    """Return how far each rank of an attempt came; a rank that left nothing is missing."""
    files = by_rank(opened.files)
    out = []
    for rank in sorted({*opened.progress, *files}):
        last = max((file.last_step for file in files.get(rank, ())), default=-1)
        progress = opened.progress.get(rank)
        if progress is None:
            out.append(RankState(rank, "", RunStatus.UNKNOWN, last, last, None))
            continue
        stated = opened.entry.step_offset + progress.step if progress.step >= 0 else -1
        out.append(
            RankState(rank, progress.process.host, progress.status_now(), last, stated, progress.ended)
        )
    return tuple(out)


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
    local: bool,
    window: tuple[int, int] | None = None,
) -> Block:
    """Return stored columns of one attempt.

    Parameters
    ----------
    files:
        Its files.
    series, columns, names, part:
        The stored columns, over which parameters.
    local:
        Return what a rank holds as it is, instead of joining a whole.
    window:
        The first global step and the one behind the last, None for all.
    """
    ranks = by_rank(files)
    wanted = list(columns)
    if len(ranks) > 1 and not local and series in COMPARED:
        wanted = list(dict.fromkeys((*columns, COMPARED[series])))
    if local or len(ranks) == 1:
        windows: list[tuple[int, int] | None] = [window]
    else:
        windows = _windows(ranks, series, len(names) * 8 * (len(wanted) + 2), window)
    records = [] if local else [_records(mine) for mine in ranks.values()]
    positions = [_position(mine) for mine in ranks.values()] if len(ranks) > 1 and not local else []
    out = []
    for between in windows:
        blocks = [
            frames.join_attempts(
                [frames.rank_block(file, series, wanted, names, part, between) for file in mine]
            )
            for mine in ranks.values()
        ]
        if local:
            return frames.join_attempts(blocks)
        out.append(frames.join_ranks(blocks, records, series, names, positions))
    return frames.join_attempts(out)


def _windows(
    ranks: Mapping[int, Sequence[RankFile]],
    series: str,
    row_bytes: int,
    within: tuple[int, int] | None,
) -> list[tuple[int, int] | None]:
    """Return windows of steps in which the rows of all ranks fit into :data:`WINDOW_BYTES`."""
    rows = sum(file.count(series, within) for mine in ranks.values() for file in mine)
    count = -(-rows * row_bytes // WINDOW_BYTES)
    if count <= 1:
        return [within]
    first, end = within or (-(2**62), 2**62)
    steps = np.unique(np.concatenate([file.steps(series) for file in next(iter(ranks.values()))]))
    steps = steps[(steps >= first) & (steps < end)]
    cuts = sorted({int(part[0]) for part in np.array_split(steps, count) if len(part)})
    return list(itertools.pairwise([first, *cuts[1:], end]))


def scalars(files: Sequence[RankFile], source: str, name: str) -> dict[int, Values]:
    """Return the values of a scalar by rank and global step."""
    out: dict[int, Values] = {}
    for rank, mine in by_rank(files).items():
        for file in mine:
            for identifier in file.scalar_ids(source, name):
                steps, values = file.scalar(identifier)
                out.setdefault(rank, {}).update(zip(steps.tolist(), values.tolist(), strict=True))
    return out


def lowest(values: Mapping[int, Values]) -> Values:
    """Return, at each step, the value of the lowest rank that logged it."""
    out: Values = {}
    for rank in sorted(values, reverse=True):
        out.update(values[rank])
    return out


def mean(values: Mapping[int, Values]) -> Values:
    """Return, at each step, the mean over the ranks that logged it."""
    steps = dict.fromkeys(step for mine in values.values() for step in mine)
    return {step: float(np.mean([mine[step] for mine in values.values() if step in mine])) for step in steps}


def from_total(files: Sequence[RankFile], name: str, norms: Callable[[], Block]) -> Values:
    """Return one of :data:`FROM_TOTAL`, computed from the joined gradient norms that ``norms`` returns."""
    if name == "total_norm":
        return frames.total(norms())
    stated = lowest(scalars(files, "backlight", name))
    by_total = lowest(scalars(files, "backlight", "clip/by_total"))
    if not by_total:
        return stated
    total, limit = frames.total(norms()), lowest(scalars(files, "backlight", "clip/limit"))
    for step in by_total:
        if step in total and step in limit:
            factor = min(1.0, limit[step] / (total[step] + _EPSILON))
            stated[step] = total[step] if name == "clip/norm" else factor
    return stated


def alone(files: Sequence[RankFile]) -> bool:
    """Return whether one rank holds everything, so that its scalars of the whole are right."""
    ranks = by_rank(files)
    return len(ranks) == 1 and not any(
        frames.divided(record, "gradient") for mine in ranks.values() for record in _records(mine).values()
    )


def spread(values: Mapping[int, Values], unit: str) -> Spread:
    """Return the values of ranks as one table."""
    ranks = tuple(sorted(values))
    steps = sorted({step for mine in values.values() for step in mine})
    shape = len(steps), len(ranks)
    table = np.array([[values[r].get(step, np.nan) for r in ranks] for step in steps], dtype=np.float64)
    logged = np.array([[step in values[r] for r in ranks] for step in steps], dtype=bool)
    return Spread(ranks, np.array(steps, dtype=np.int64), table.reshape(shape), logged.reshape(shape), unit)


def _records(files: Sequence[RankFile]) -> dict[str, ParameterRecord]:
    return {p.name: p for file in files for table in file.tables.values() for p in table}


def _position(files: Sequence[RankFile]) -> Values:
    return {step: value for file in files for step, value in file.positions.items()}
