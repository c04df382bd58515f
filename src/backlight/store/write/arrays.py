"""Files next to the database: arrays, in pieces that appear complete, and evidence of findings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backlight.store.format.hdf5_pieces import (
    PLAIN,
    ArrayInfo,
    Filters,
    Stack,
    merged,
    read_piece,
    write_piece,
)
from backlight.store.format.names import EVIDENCE, piece_name, safe_name
from backlight.store.format.schema import ARRAY_ENCODINGS

MAX_MERGED_BYTES = 64 * 1024 * 1024
"""Pieces are not merged beyond this size."""


@dataclass(slots=True)
class _Piece:
    first: int
    last: int
    size: int
    compressed: bool = False


class ArrayWriter:
    """Buffers arrays and writes each flush as one piece; a small piece is merged with its predecessor.

    Merging goes by size as in a binary counter: every array is rewritten a logarithmic number of times.
    Pieces that will be merged again are stored plain; a piece is compressed once, when it is so large
    that it stays, or at the end.
    """

    def __init__(self, folder: Path, rank: int, filters: Filters = Filters()) -> None:  # noqa: B008 - frozen
        self.folder = folder
        self.pending_bytes = 0
        self._filters = filters
        self._finishing = False
        self._rank = rank
        self._pending: list[Stack] = []
        self._pieces: list[_Piece] = []

    def add(
        self, name: str, step: int, values: npt.ArrayLike, dims: Sequence[str], unit: str, encoding: str
    ) -> None:
        """Buffer a copy of one array."""
        array = np.array(values, copy=True)
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
            msg = f"array {name!r} has type {array.dtype}, expected booleans, integers, floats or complex"
            raise ValueError(msg)
        if dims and len(dims) != array.ndim:
            raise ValueError(f"array {name!r} has {array.ndim} axes, but {len(dims)} dims: {tuple(dims)}")
        if encoding not in ARRAY_ENCODINGS:
            known = ", ".join(ARRAY_ENCODINGS)
            raise ValueError(f"array {name!r}: there is no encoding {encoding!r}; there are {known}")
        if encoding == "bf16" and array.dtype != np.uint16:
            msg = f"array {name!r}: encoding 'bf16' stores 16 bits as uint16, got {array.dtype}"
            raise ValueError(msg)
        kind = "bfloat16" if encoding == "bf16" else array.dtype.name
        info = ArrayInfo(name, tuple(dims), kind, unit, encoding, ARRAY_ENCODINGS[encoding])
        self._pending.append(Stack(info, np.array([step], dtype=np.int64), array[None]))
        self.pending_bytes += array.nbytes

    def flush(self) -> bool:
        """Write the buffered arrays as a piece; return whether there were any. An OSError passes through."""
        if not self._pending:
            return False
        pending, self._pending, self.pending_bytes = self._pending, [], 0
        self.folder.mkdir(exist_ok=True)
        number = self._pieces[-1].last + 1 if self._pieces else 0
        self._pieces.append(self._write(number, number, merged(pending)))
        while len(self._pieces) > 1:
            older, newer = self._pieces[-2:]
            if older.size > 2 * newer.size or older.size + newer.size > MAX_MERGED_BYTES:
                break
            self._pieces[-2:] = [self._merge(older, newer)]
        return True

    def begin_finish(self) -> bool:
        """Return whether a piece is still plain; from now on its size is stated as not known."""
        self._finishing = True
        return any(not piece.compressed for piece in self._pieces)

    def finish(self) -> None:
        """Compress the plain pieces; an OSError passes through, with every piece still whole."""
        for i, piece in enumerate(self._pieces):
            if not piece.compressed:
                stacks = list(read_piece(self._path(piece)))
                self._pieces[i] = self._write(piece.first, piece.last, stacks, compress=True)

    def size(self) -> int:
        """Return the bytes of all pieces."""
        return sum(piece.size for piece in self._pieces)

    def files(self) -> dict[str, dict[str, int]]:
        """Return the pieces by name with their size, as the manifest states them."""
        return {
            piece_name(self._rank, p.first, p.last): {
                "bytes": 0 if self._finishing and not p.compressed else p.size
            }
            for p in self._pieces
        }

    def _path(self, piece: _Piece) -> Path:
        return self.folder / piece_name(self._rank, piece.first, piece.last)

    def _write(self, first: int, last: int, stacks: Sequence[Stack], *, compress: bool = False) -> _Piece:
        path = self.folder / piece_name(self._rank, first, last)
        compress = compress or sum(stack.values.nbytes for stack in stacks) > MAX_MERGED_BYTES // 2
        write_piece(path, stacks, self._filters if compress else PLAIN)
        return _Piece(first, last, path.stat().st_size, compress)

    def _merge(self, older: _Piece, newer: _Piece) -> _Piece:
        old, new = self._path(older), self._path(newer)
        piece = self._write(older.first, newer.last, merged([*read_piece(old), *read_piece(new)]))
        old.unlink()
        new.unlink()
        return piece


def write_evidence(attempt: Path, name: str, data: bytes | str) -> Path:
    """Write a file below ``evidence/`` under a safe, unique name; an OSError passes through."""
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    folder = attempt / EVIDENCE
    folder.mkdir(exist_ok=True)
    safe = safe_name(name, "evidence")
    stem, dot, suffix = safe.rpartition(".")
    number = 0
    while True:
        candidate = safe if number == 0 else f"{stem or suffix}-{number}{dot + suffix if stem else ''}"
        try:
            descriptor = os.open(folder / candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            number += 1
    with os.fdopen(descriptor, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(descriptor)
    return folder / candidate
