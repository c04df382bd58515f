"""The writing side of arrays: pieces that are complete before they are seen, and that stay few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.format.hdf5_filters import PLAIN, Filters
from backlight.store.format.hdf5_pieces import (
    ArrayInfo,
    Stack,
    merged,
    piece_name,
    read_piece,
    stacked,
    write_piece,
)
from backlight.store.format.schema import ARRAY_ENCODINGS

ROLL_SIZE = 64 * 1024 * 1024
"""Bytes beyond which a piece is not merged with another one."""


@dataclass(slots=True)
class _Piece:
    first: int
    last: int
    size: int
    packed: bool = False


class ArrayWriter:
    """Buffers arrays and writes each flush as one piece; a small piece is merged with its predecessor.

    Merging goes by size as in a binary counter: every array is rewritten a logarithmic number of times,
    and a long run has few pieces. The merged piece is published first and says in its name
    which pieces it replaces. What will be merged again is stored plain; a piece is compressed once, when
    it is so large that it stays, or at the end.
    """

    def __init__(self, folder: Path, rank: int, filters: Filters = Filters()) -> None:  # noqa: B008 - frozen
        self.folder = folder
        self._filters = filters
        self.pending_bytes = 0
        self._finishing = False
        self._rank = rank
        self._pending: list[tuple[ArrayInfo, int, npt.NDArray[Any]]] = []
        self._pieces: list[_Piece] = []

    def add(
        self, name: str, step: int, values: npt.ArrayLike, dims: Sequence[str], unit: str, encoding: str
    ) -> None:
        """Buffer a copy of one array.

        Raises
        ------
        ValueError
            If the array does not fit its description, or holds no plain numbers.
        """
        array = np.array(values, copy=True)
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
            msg = f"array {name!r} has type {array.dtype}, expected booleans, integers, floats or complex"
            raise ValueError(msg)
        if dims and len(dims) != array.ndim:
            msg = f"array {name!r} has {array.ndim} axes, but {len(dims)} dims: {tuple(dims)}"
            raise ValueError(msg)
        if encoding not in ARRAY_ENCODINGS:
            known = ", ".join(ARRAY_ENCODINGS)
            raise ValueError(f"array {name!r}: there is no encoding {encoding!r}; there are {known}")
        if encoding == "bf16" and array.dtype != np.uint16:
            msg = f"array {name!r}: encoding 'bf16' stores 16 bits as uint16, got {array.dtype}"
            raise ValueError(msg)
        kind = "bfloat16" if encoding == "bf16" else array.dtype.name
        info = ArrayInfo(name, tuple(dims), kind, unit, encoding, ARRAY_ENCODINGS[encoding])
        self._pending.append((info, int(step), array))
        self.pending_bytes += array.nbytes

    def flush(self) -> bool:
        """Write what is buffered as a piece; tell whether there was anything. An OSError passes through."""
        if not self._pending:
            return False
        pending, self._pending, self.pending_bytes = self._pending, [], 0
        self.folder.mkdir(exist_ok=True)
        number = self._pieces[-1].last + 1 if self._pieces else 0
        self._pieces.append(self._write(number, number, stacked(pending)))
        while len(self._pieces) > 1:
            older, newer = self._pieces[-2:]
            if older.size > 2 * newer.size or older.size + newer.size > ROLL_SIZE:
                break
            self._pieces[-2:] = [self._merge(older, newer)]
        return True

    def unpacked(self) -> bool:
        """Tell whether something is still stored plain; its size is from now on stated as not known."""
        self._finishing = True
        return any(not piece.packed for piece in self._pieces)

    def finish(self) -> None:
        """Compress what is still stored plain; an OSError passes through, with every piece still whole."""
        for place, piece in enumerate(self._pieces):
            if not piece.packed:
                path = self._path(piece)
                self._pieces[place] = self._write(piece.first, piece.last, list(read_piece(path)), pack=True)

    def size(self) -> int:
        """Return the bytes of all pieces."""
        return sum(piece.size for piece in self._pieces)

    def files(self) -> dict[str, dict[str, int]]:
        """Return the pieces by name with their size, as the manifest states them."""
        return {
            piece_name(self._rank, p.first, p.last): {
                "bytes": 0 if self._finishing and not p.packed else p.size
            }
            for p in self._pieces
        }

    def _path(self, piece: _Piece) -> Path:
        return self.folder / piece_name(self._rank, piece.first, piece.last)

    def _write(self, first: int, last: int, stacks: Sequence[Stack], *, pack: bool = False) -> _Piece:
        path = self.folder / piece_name(self._rank, first, last)
        pack = pack or sum(stack.values.nbytes for stack in stacks) > ROLL_SIZE // 2
        write_piece(path, stacks, self._filters if pack else PLAIN)
        return _Piece(first, last, path.stat().st_size, pack)

    def _merge(self, older: _Piece, newer: _Piece) -> _Piece:
        old, new = self._path(older), self._path(newer)
        piece = self._write(older.first, newer.last, merged([*read_piece(old), *read_piece(new)]))
        old.unlink()
        new.unlink()
        return piece
