"""Rows of several ranks that were joined once, kept while a run grows: only the newest are joined anew.

A step is joined again when any rank recorded more of it: all steps from the first such one on. What lies
before it cannot change, as long as the files, their parameter tables and the names are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backlight.store.read import join_ranks
from backlight.store.read.frames import Block
from backlight.store.read.rank_file import RankFile

VERSIONS = 2
"""Readings whose rows are kept: what is shown is a little older than what is read."""

END = 2**62
"""A step behind all others."""

Mark = tuple[tuple[int, int], ...]
"""How far each file had come: its last rows of the series and of the scalars."""


@dataclass(slots=True)
class Joined:
    """The joined columns of one series of one attempt, by how far its files had come.

    ``by`` is the reading that came as far.
    """

    held_for: tuple[object, ...]
    by: int
    versions: OrderedDict[Mark, Block] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held; readings between which nothing came share theirs."""
        blocks = {id(block): block for block in self.versions.values()}.values()
        seen = sum(block.seen.nbytes for block in blocks if block.seen is not None)
        return seen + sum(
            block.measured.nbytes + sum(values.nbytes for values in block.columns.values())
            for block in blocks
        )

    def is_ahead(self, files: Sequence[RankFile], series: str) -> bool:
        """Tell whether what is held goes further than the files: one of them is shorter than it was."""
        return bool(self.versions) and _behind(mark_of(files, series), next(reversed(self.versions)))

    def keep(self, mark: Mark, block: Block) -> None:
        """Remember a version, and forget those before the last ones."""
        self.versions[mark] = block
        while len(self.versions) > VERSIONS:
            self.versions.popitem(last=False)


def kind_of(files: Sequence[RankFile], names: tuple[str, ...]) -> tuple[object, ...]:
    """Return what must stay for joined rows to stay: the files, their parameter tables, the names."""
    return names, tuple((file.path, file.rank, file.step_offset, tuple(file.tables())) for file in files)


def mark_of(files: Sequence[RankFile], series: str) -> Mark:
    """Return how far each file has come."""
    return tuple((file.last[f"series_{series}"], file.last["scalar"]) for file in files)


def grown(
    held: Joined,
    files: Sequence[RankFile],
    series: str,
    columns: Sequence[str],
    names: tuple[str, ...],
    part: int,
) -> Block | None:
    """Return stored columns of one attempt from what is held and newer rows, None where those do not fit."""
    mark = mark_of(files, series)
    if mark in held.versions:
        return held.versions[mark]
    if not held.versions:
        block = join_ranks.block(files, series, columns, names, part, local=False)
        held.keep(mark, block)
        return block
    before, known = next(reversed(held.versions.items()))
    if _behind(mark, before):
        return None  # this reading is an older one
    first = min(
        (
            step
            for file, (rows, scalars) in zip(files, before, strict=True)
            for step in (file.first_after(f"series_{series}", rows), _position_after(file, scalars))
            if step is not None
        ),
        default=END,
    )
    block = known
    if first < END:
        head = int(np.searchsorted(known.steps, first))
        tail = join_ranks.block(files, series, columns, names, part, local=False, window=(first, END))
        block = _appended(known, head, tail)
    held.keep(mark, block)
    return block


def _behind(mark: Mark, other: Mark) -> bool:
    """Tell whether any file had come less far than in another reading."""
    return any(now < then for pair in zip(mark, other, strict=True) for now, then in zip(*pair, strict=True))


def _position_after(file: RankFile, row: int) -> int | None:
    """Return the first step that has news of where the rank stood: ranks are aligned by that."""
    known = [
        i for i, source, name in file.scalar_names() if (source, name) == ("backlight", join_ranks.POSITION)
    ]
    found = [file.first_after("scalar", row, f" AND name = {identifier}") for identifier in known]
    return min((step for step in found if step is not None), default=None)


def _appended(known: Block, head: int, tail: Block) -> Block:
    seen = [
        known.measured if known.seen is None else known.seen,
        tail.measured if tail.seen is None else tail.seen,
    ]
    return Block(
        np.concatenate([known.steps[:head], tail.steps]),
        {name: np.concatenate([known.columns[name][:head], tail.columns[name]]) for name in known.columns},
        np.concatenate([known.measured[:head], tail.measured]),
        np.concatenate([seen[0][:head], seen[1]]),
    )
