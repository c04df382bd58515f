"""Encoding of recorded numbers as bytes, and back: as small as possible without loss.

A blob of a series starts with one letter per column and continues with the columns, little-endian:

======  =======================================================================
``c``   one value of 8 bytes that holds for all P rows
``n``   nothing: the column equals the ``numel`` of the parameter table
``f``   P float32 (only where every value of the column survives it exactly)
``d``   P float64
``b``   P int8; ``h`` int16; ``i`` int32; ``q`` int64
======  =======================================================================

A block of scalars holds N values in the order in which they were logged. Its integers are three columns of N
rows: the id of the name, the step less that of the value before, and one code per value. Its floats follow,
by name and within a name in the order of logging: first all of code 1, then those of code 2.

====  ==================================================================
0     the value is that of the same name before it, bit by bit
1     float32, which the value survives bit by bit
2     float64
====  ==================================================================

Of old scalars of every step, mean, minimum, maximum and number of each bin of steps are kept. The mean stays
under the id of the scalar, at the first step of the bin; the others have ids of their own.

Shapes: S steps, P parameters, K columns.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

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


def decode_column(
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
    """Return all columns of one blob without sizes of a parameter table, each ``[P]``."""
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


BLOCK_VALUES = 1024
"""Values of a full block: a page of the database holds several, so that little of it stays empty."""

_SAME, _NARROW, _WIDE = 0, 1, 2
_COLUMNS = 3
_COMPRESSION_LEVEL = 3


class LoggedValues(NamedTuple):
    """Values in the order in which they were logged: ids of their names, steps and numbers."""

    names: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float]]) -> LoggedValues:
        """Return rows of name, step and value as columns."""
        names, steps, values = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(
            np.array(names, dtype=np.int64), np.array(steps, dtype=np.int64), np.array(values, dtype=float)
        )

    @classmethod
    def join(cls, parts: Sequence[LoggedValues]) -> LoggedValues:
        """Return the values of several parts, one after the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else cls.of([])

    def between(self, first: int, end: int) -> LoggedValues:
        """Return the values from one position up to another."""
        return LoggedValues(self.names[first:end], self.steps[first:end], self.values[first:end])

    def split(self, size: int) -> list[LoggedValues]:
        """Return parts of ``size`` values, the last of which may have fewer."""
        return [self.between(first, first + size) for first in range(0, len(self.steps), size)]


def encode_scalars(logged: LoggedValues) -> tuple[bytes, bytes]:
    """Return floats and integers of a block as bytes."""
    order, is_first = _by_name(logged.names)
    values = logged.values[order]
    bits = values.view(np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
    # Compared as bits, so that -0.0 and the payload of a NaN survive as well.
    codes = np.where(narrow.astype(np.float64).view(np.int64) == bits, _NARROW, _WIDE)
    codes[1:][(bits[1:] == bits[:-1]) & ~is_first[1:]] = _SAME
    in_order = np.empty_like(codes)
    in_order[order] = codes
    columns = np.stack([logged.names, np.diff(logged.steps, prepend=0), in_order], axis=-1)
    (integers,) = encode_integers(columns[np.newaxis])
    floats = narrow[codes == _NARROW].astype("<f4").tobytes() + values[codes == _WIDE].astype("<f8").tobytes()
    return floats, zlib.compress(integers, _COMPRESSION_LEVEL)


def decode_scalars(count: int, floats: bytes, integers: bytes) -> LoggedValues:
    """Return the ``count`` values of a block.

    Raises
    ------
    RunFormatError
        If the bytes are those of no such block.
    """
    if not 0 < count <= BLOCK_VALUES:
        raise RunFormatError(f"a block of scalars has {count} values, expected 1 to {BLOCK_VALUES}")
    try:
        plain = zlib.decompressobj().decompress(integers, _COLUMNS * (1 + 8 * count))
    except zlib.error as error:
        raise RunFormatError(f"a block of scalars cannot be decompressed: {error}") from None
    names, deltas, in_order = decode_row(plain, "i", count, _COLUMNS)
    order, _ = _by_name(names)
    codes = in_order[order]
    is_narrow, is_wide = codes == _NARROW, codes == _WIDE
    narrow, wide = int(np.count_nonzero(is_narrow)), int(np.count_nonzero(is_wide))
    if len(floats) != 4 * narrow + 8 * wide:
        raise RunFormatError(
            f"a block of scalars has {len(floats)} bytes of floats, expected {4 * narrow + 8 * wide}"
        )
    values = np.zeros(count)
    values[is_narrow] = np.frombuffer(floats, "<f4", narrow)
    values[is_wide] = np.frombuffer(floats, "<f8", wide, offset=4 * narrow)
    stored = np.maximum.accumulate(np.where(codes == _SAME, 0, np.arange(count)))
    in_logged_order = np.empty_like(values)
    in_logged_order[order] = values[stored]
    return LoggedValues(names, np.cumsum(deltas), in_logged_order)


def _by_name(names: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the order of values by name, and which of them are the first of their name."""
    order = np.argsort(names, kind="stable")
    by_name = names[order]
    return order, np.concatenate([[True], by_name[1:] != by_name[:-1]])


WHOLE_STEPS = 100_000
"""Newest steps of a file that always stay as they are; what is older is thinned at twice so many."""

MOST_BINS = 50_000
"""Bins of one scalar, at most."""

SOURCES = ("minimum", "maximum", "number")
"""Sources by which a reader gets what belongs to the means: least and greatest value, and how many."""

BY_SOURCE = 1 << 32
"""What the id of a scalar grows by from one of the sources to the next."""

_KEPT = 1 + len(SOURCES)
"""Values that a bin takes; one of fewer stays as it is, so that thinned values never take more room."""


def bin_width(steps: int) -> int:
    """Return the steps of a bin, a power of two, by which ``steps`` make at most :data:`MOST_BINS` bins."""
    width = _KEPT
    while steps > width * MOST_BINS:
        width *= 2
    return width


def thin(logged: LoggedValues, scalars: Collection[int], width: int) -> LoggedValues:
    """Return the values, those of ``scalars`` (ids of names) by bins of ``width`` steps, others unchanged.

    Values that were thinned before, by a divisor of ``width``, are thinned further, their means by number.
    """
    is_thinned = np.isin(logged.names % BY_SOURCE, list(scalars))
    parts = [_where(logged, ~is_thinned)]
    for scalar in scalars:
        parts += _thinned(logged, scalar, width)
    joined = LoggedValues.join(parts)
    return _where(joined, np.argsort(joined.steps, kind="stable"))


def _where(logged: LoggedValues, at: npt.NDArray[Any]) -> LoggedValues:
    return LoggedValues(logged.names[at], logged.steps[at], logged.values[at])


def _thinned(logged: LoggedValues, scalar: int, width: int) -> list[LoggedValues]:
    here = logged.names == scalar
    # Of a step that was logged twice the last value counts.
    steps, at = np.unique(logged.steps[here][::-1], return_index=True)
    means = logged.values[here][::-1][at]
    if not len(steps):
        return []
    columns = [means, means.copy(), means.copy(), np.ones(len(steps))]
    for kind in range(1, _KEPT):
        belongs = logged.names == scalar + kind * BY_SOURCE
        columns[kind][np.searchsorted(steps, logged.steps[belongs])] = logged.values[belongs]
    means, lowest, highest, numbers = columns
    finite = np.isfinite(means)
    parts = _rows(scalar, 0, steps[~finite], means[~finite])
    steps, means, lowest, highest, numbers = (
        column[finite] for column in (steps, means, lowest, highest, numbers)
    )
    if not len(steps):
        return parts
    first = np.flatnonzero(np.diff(steps // width, prepend=-1))
    sizes = np.diff(first, append=len(steps))
    totals = np.add.reduceat(numbers, first)
    # Scaled by the share of each, so that the sum of large values stays finite.
    sums = np.add.reduceat(means * (numbers / np.repeat(totals, sizes)), first)
    is_binned = totals >= _KEPT
    stays = np.repeat(~is_binned, sizes)
    parts += _rows(scalar, 0, steps[stays], means[stays])
    binned = (
        sums, np.minimum.reduceat(lowest, first), np.maximum.reduceat(highest, first), totals,
    )  # fmt: skip
    for kind, values in enumerate(binned):
        parts += _rows(scalar, kind, steps[first][is_binned], values[is_binned])
    return parts


def _rows(
    scalar: int, kind: int, steps: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> list[LoggedValues]:
    return [LoggedValues(np.full(len(steps), scalar + kind * BY_SOURCE), steps, values.astype(float))]
