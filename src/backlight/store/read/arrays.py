"""Files of a run next to its databases: arrays in pieces, and evidence of findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.errors import RunFormatError
from backlight.store.format.hdf5_pieces import ArrayInfo, Stack, decoded, read_piece
from backlight.store.format.names import EVIDENCE, pieces
from backlight.store.read.attempt_files import AttemptFiles

_TRIES = 3


def infos(
    opened: Sequence[AttemptFiles], losses: dict[str, None], name: str | None = None
) -> list[ArrayInfo]:
    """Return the descriptions of all stored arrays, or of one, oldest first; errors go to ``losses``."""
    return [stack.info for one in opened for _, stack in _stacks(one, name, losses, values=False)]


def values(
    opened: Sequence[AttemptFiles],
    name: str,
    attempt: int | None,
    rank: int | None,
    losses: dict[str, None],
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]:
    """Return global steps and values of one array, joined over attempts and ranks."""
    merged: dict[int, npt.NDArray[Any]] = {}
    for one in opened:
        if attempt is not None and one.entry.index != attempt:
            continue
        mine: dict[int, tuple[int, npt.NDArray[Any]]] = {}
        for owner, stack in _stacks(one, name, losses, values=True):
            if rank is not None and owner != rank:
                continue
            for step, value in zip(stack.steps.tolist(), stack.values, strict=True):
                if step not in mine or owner <= mine[step][0]:
                    mine[step] = (owner, decoded(stack.info, np.asarray(value)))
        merged.update({step + one.entry.step_offset: value for step, (_, value) in mine.items()})
    order = sorted(merged)
    return np.array(order, dtype=np.int64), [merged[step] for step in order]


def evidence(path: Path, opened: Sequence[AttemptFiles]) -> tuple[str, ...]:
    """Return the evidence files, by path below the run directory; links are not followed."""
    out = []
    for one in opened:
        folder = one.folder / EVIDENCE
        if folder.is_dir() and not folder.is_symlink():
            out += [
                p.relative_to(path).as_posix() for p in folder.iterdir() if p.is_file() and not p.is_symlink()
            ]
    return tuple(sorted(out))


def _stacks(
    opened: AttemptFiles, name: str | None, losses: dict[str, None], *, values: bool
) -> Iterator[tuple[int, Stack]]:
    for i in range(_TRIES):
        out: list[tuple[int, Stack]] = []
        problems = []
        for rank, path in pieces(opened.folder):
            try:
                out += [(rank, stack) for stack in read_piece(path, name, values=values)]
            except RunFormatError as error:
                problems.append((path, str(error)))
        # A piece that vanished was merged by a living writer meanwhile: list them again.
        if i == _TRIES - 1 or all(path.exists() for path, _ in problems):
            losses.update(dict.fromkeys(text for _, text in problems))
            yield from out
            return
