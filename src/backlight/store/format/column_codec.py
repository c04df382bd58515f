"""Encoding of a recorded step as bytes, and back: column by column, as small as possible without loss.

A blob starts with one letter per column and continues with the columns in that order, little-endian:

======  =======================================================================
``c``   one value of 8 bytes that holds for all P rows
``n``   nothing: the column equals the ``numel`` of the parameter table
``f``   P float32 (only where every value of the column survives it exactly)
``d``   P float64
``b``   P int8; ``h`` int16; ``i`` int32; ``q`` int64
======  =======================================================================

Shapes: S steps, P parameters, K columns. A batch shares its letters, so that encoding costs a few
vector operations per flush and not per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.errors import RunFormatError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_WIDTHS = {"f": 4, "d": 8, "b": 1, "h": 2, "i": 4, "q": 8}
_LETTERS = {"f": "cfd", "i": "cnbhiq"}
"""Letters that a column of floats or of integers may have."""


def encode_floats(values_SPK: Floats) -> list[bytes]:
    """Return one blob per step."""
    S, P, K = values_SPK.shape
    letters, parts = [], []
    columns_KSP = np.ascontiguousarray(values_SPK.transpose(2, 0, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        narrow_KSP = columns_KSP.astype(np.float32)
    for k in range(K):
        column_SP, narrow_SP = columns_KSP[k], narrow_KSP[k]
        bits_SP = column_SP.view(np.int64)
        if P == 0 or (bits_SP == bits_SP[0, 0]).all():
            letters.append("c")
            parts.append(_repeat(bits_SP[0, 0] if P else np.int64(0), S))
        # Compared as bits, so that -0.0 and the payload of a NaN survive as well.
        elif (narrow_SP.astype(np.float64).view(np.int64) == bits_SP).all():
            letters.append("f")
            parts.append(_as_bytes(narrow_SP, "<f4"))
        else:
            letters.append("d")
            parts.append(_as_bytes(column_SP, "<f8"))
    return _join(letters, parts, S)


def encode_integers(values_SPK: Integers, numel_P: Integers | None = None) -> list[bytes]:
    """Return one blob per step; ``numel_P`` is the column of the parameter table, where known."""
    S, P, K = values_SPK.shape
    letters, parts = [], []
    columns_KSP = np.ascontiguousarray(values_SPK.transpose(2, 0, 1))
    for k in range(K):
        column_SP = columns_KSP[k]
        low, high = (int(column_SP.min()), int(column_SP.max())) if P else (0, 0)
        if low == high:
            letters.append("c")
            parts.append(_repeat(np.int64(low), S))
        elif numel_P is not None and (column_SP == numel_P).all():
            letters.append("n")
        else:
            bits = max((bound if bound >= 0 else ~bound).bit_length() for bound in (low, high))
            letter = next(c for c in "bhiq" if bits < 8 * _WIDTHS[c])
            letters.append(letter)
            parts.append(_as_bytes(column_SP, f"<i{_WIDTHS[letter]}"))
    return _join(letters, parts, S)


def decode(
    blobs: Sequence[bytes], kind: str, P: int, K: int, wanted: int, numel_P: Integers | None = None
) -> npt.NDArray[Any]:
    """Return the column ``wanted`` of ``K`` as ``[S, P]``: float64 for the kind ``f``, int64 for ``i``."""
    dtype = np.dtype(f"{kind}8")
    chunks = [np.zeros((0, P), dtype)]
    for letter, part_SB in _parts(blobs, P, K, wanted, _LETTERS[kind]):
        S = len(part_SB)
        if letter == "n" and numel_P is None:
            raise RunFormatError(
                "a row of a series refers to the sizes of a parameter table that is not there"
            )
        if letter == "n":
            part = np.broadcast_to(numel_P, (S, P))  # type: ignore[arg-type]  # not None
        elif letter == "c":
            part = np.broadcast_to(part_SB.view(f"<{kind}8"), (S, P))
        else:
            part = part_SB.view(f"<{kind}{_WIDTHS[letter]}").reshape(S, P)
        chunks.append(part.astype(dtype))
    return np.concatenate(chunks)


def decode_row(blob: bytes, kind: str, P: int, K: int) -> list[npt.NDArray[Any]]:
    """Return all columns of one blob without sizes of a parameter table, each ``[P]``, as :func:`decode`."""
    columns = []
    for letter, start, size in _layout(blob[:K], len(blob), P, K, _LETTERS[kind].replace("n", "")):
        part = np.frombuffer(blob, np.uint8, size, start).view(f"<{kind}{_WIDTHS.get(letter, 8)}")
        columns.append(np.broadcast_to(part, P).astype(f"{kind}8"))
    return columns


def _parts(blobs: Sequence[bytes], P: int, K: int, wanted: int, allowed: str) -> Iterator[tuple[str, Bytes]]:
    """Yield letter and bytes ``[S, B]`` of one column for each run of blobs of one layout."""
    for (head, length), group in itertools.groupby(blobs, key=lambda blob: (blob[:K], len(blob))):
        letter, start, size = _layout(head, length, P, K, allowed)[wanted]
        rows_SL = np.frombuffer(b"".join(group), dtype=np.uint8).reshape(-1, length)
        yield letter, np.ascontiguousarray(rows_SL[:, start : start + size])


def _layout(head: bytes, length: int, P: int, K: int, allowed: str) -> list[tuple[str, int, int]]:
    """Return letter, first byte and number of bytes of each column of a blob, by its first K bytes."""
    letters = head.decode("latin-1")
    if len(letters) != K or any(letter not in allowed for letter in letters):
        msg = f"a row of a series starts with {head!r}, expected {K} letters of {allowed!r}"
        raise RunFormatError(msg)
    sizes = [{"c": 8, "n": 0}.get(letter, P * _WIDTHS.get(letter, 0)) for letter in letters]
    if K + sum(sizes) != length:
        msg = f"a row of a series has {length} bytes, expected {K + sum(sizes)} for {P} parameters"
        raise RunFormatError(msg)
    return list(zip(letters, itertools.accumulate(sizes, initial=K), sizes, strict=False))


def _repeat(value: np.int64, S: int) -> Bytes:
    return np.broadcast_to(np.array([value], dtype="<i8").view(np.uint8), (S, 8))


def _as_bytes(column_SP: npt.NDArray[np.generic], dtype: str) -> Bytes:
    narrowed = np.ascontiguousarray(column_SP.astype(dtype, casting="unsafe"))
    return narrowed.view(np.uint8).reshape(len(narrowed), -1)


def _join(letters: list[str], parts: list[Bytes], S: int) -> list[bytes]:
    head = np.frombuffer("".join(letters).encode("ascii"), dtype=np.uint8)
    whole_SL = np.concatenate([np.broadcast_to(head, (S, len(head))), *parts], axis=1)
    length, data = whole_SL.shape[1], whole_SL.tobytes()
    return [data[i * length : (i + 1) * length] for i in range(S)]
