"""Encoding of recorded numbers as bytes, and back: as small as possible without loss.

A block of S recorded steps is a blob that starts with one letter per column and continues with the columns in
that order, little-endian:

======  =======================================================================
``c``   one value of 8 bytes that holds for all
``n``   nothing: the column equals the ``numel`` of the parameter table
``f``   S x P float32 (only where every value of the column survives it exactly)
``d``   S x P float64
``b``   S x P int8; ``h`` int16; ``i`` int32; ``q`` int64
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backlight.store.errors import RunFormatError
from backlight.store.format.schema import checksum

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

Sizes = Mapping[int, npt.NDArray[np.int64]]
"""Sizes of the parameters, by the id of their table."""

Row = tuple[int, int, int, npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Part, step, id of the parameter table, floats ``[P, F]``, integers ``[P, I]``."""

MAX_BLOCK_VALUES = 2**17
"""Numbers in a row of a series, unless one step has more: it is read as a whole."""

_WIDTHS = {"f": 4, "d": 8, "b": 1, "h": 2, "i": 4, "q": 8}
_LETTERS = {"f": "cfd", "i": "cnbhiq"}
"""Letters that a column of floats or of integers may have."""


def encode_floats(values_SPK: Floats) -> bytes:
    """Return the blob of a block of steps."""
    letters, parts = b"", []
    for column_SP in np.ascontiguousarray(values_SPK.transpose(2, 0, 1)):
        bits_SP = column_SP.view(np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            narrow_SP = column_SP.astype("<f4")
        if not bits_SP.size or (bits_SP == bits_SP[0, 0]).all():
            letters += b"c"
            parts.append(np.resize(bits_SP, 1).astype("<i8"))
        # Compared as bits, so that -0.0 and the payload of a NaN survive as well.
        elif (narrow_SP.astype(np.float64).view(np.int64) == bits_SP).all():
            letters += b"f"
            parts.append(narrow_SP)
        else:
            letters += b"d"
            parts.append(column_SP.astype("<f8"))
    return b"".join([letters, *(part.tobytes() for part in parts)])


def encode_integers(values_SPK: Integers, numel_P: Integers | None = None) -> bytes:
    """Return the blob of a block of steps; ``numel_P`` is the column of the parameter table, where known."""
    letters, parts = "", []
    for column_SP in values_SPK.transpose(2, 0, 1):
        low, high = (int(column_SP.min()), int(column_SP.max())) if column_SP.size else (0, 0)
        if low == high:
            letters += "c"
            parts.append(np.array([low], dtype="<i8"))
        elif numel_P is not None and (column_SP == numel_P).all():
            letters += "n"
        else:
            bits = max((bound if bound >= 0 else ~bound).bit_length() for bound in (low, high))
            letters += next(c for c in "bhiq" if bits < 8 * _WIDTHS[c])
            parts.append(column_SP.astype(f"<i{_WIDTHS[letters[-1]]}"))
    return b"".join([letters.encode("ascii"), *(part.tobytes() for part in parts)])


def decode_column(
    blobs: Iterable[tuple[int, bytes]],
    kind: str,
    P: int,
    K: int,
    wanted: int,
    numel_P: Integers | None = None,
) -> npt.NDArray[Any]:
    """Return the column ``wanted`` of ``K`` as ``[S, P]``: float64 for the kind ``f``, int64 for ``i``.

    ``blobs`` come with their numbers of steps.

    Raises
    ------
    RunFormatError
        If a blob is not one of so many steps.
    """
    dtype = np.dtype(f"{kind}8")
    chunks = [np.zeros((0, P), dtype)]
    for S, blob in blobs:
        letter, start, size = _layout(blob[:K], len(blob), S * P, K, _LETTERS[kind])[wanted]
        part = np.frombuffer(blob, np.uint8, size, start).view(f"<{kind}{_WIDTHS.get(letter, 8)}")
        if letter == "n":
            if numel_P is None:
                raise RunFormatError("a row refers to the sizes of a parameter table that is not there")
            part = numel_P
        chunks.append(np.broadcast_to(part if letter in "cn" else part.reshape(S, P), (S, P)).astype(dtype))
    return np.concatenate(chunks)


def _layout(head: bytes, length: int, N: int, K: int, allowed: str) -> list[tuple[str, int, int]]:
    """Return letter, first byte and bytes of each column, of N values, of a blob by its first K bytes."""
    letters = head.decode("latin-1")
    if len(letters) != K or any(letter not in allowed for letter in letters):
        msg = f"a row of a series starts with {head!r}, expected {K} letters of {allowed!r}"
        raise RunFormatError(msg)
    sizes = [{"c": 8, "n": 0}.get(letter, N * _WIDTHS.get(letter, 0)) for letter in letters]
    if K + sum(sizes) != length:
        raise RunFormatError(
            f"a row of a series has {length} bytes, expected {K + sum(sizes)} for {N} values"
        )
    return list(zip(letters, itertools.accumulate(sizes, initial=K), sizes, strict=False))


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
    integers = encode_integers(columns[np.newaxis])
    floats = narrow[codes == _NARROW].astype("<f4").tobytes() + values[codes == _WIDE].astype("<f8").tobytes()
    return floats, zlib.compress(integers, _COMPRESSION_LEVEL)


def decode_scalars(count: int, floats: bytes, integers: bytes) -> LoggedValues:
    """Return the ``count`` values of a block; RunFormatError where the bytes are those of no such block."""
    if not 0 < count <= BLOCK_VALUES:
        raise RunFormatError(f"a block of scalars has {count} values, expected 1 to {BLOCK_VALUES}")
    try:
        plain = zlib.decompressobj().decompress(integers, _COLUMNS * (1 + 8 * count))
    except zlib.error as error:
        raise RunFormatError(f"a block of scalars cannot be decompressed: {error}") from None
    names, deltas, in_order = (
        decode_column([(1, plain)], "i", count, _COLUMNS, k)[0] for k in range(_COLUMNS)
    )
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


def sealed(table: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row with its checksum."""
    return *row, checksum(table, row)


def series_blocks(rows: Sequence[Row], sizes: Sizes, last: int) -> Iterator[tuple[Any, ...]]:
    """Encode steps of a series: those of one part and parameter table share a row."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[0], row[2]), []).append(row)
    for (part, table), group in groups.items():
        floats, integers = group[0][3:]
        size = max(1, MAX_BLOCK_VALUES // max(1, floats.size + integers.size))
        for i in range(0, len(group), size):
            block = group[i : i + size]
            steps_S = np.array([row[1] for row in block], dtype="<i8")
            first, last = last + 1, last + len(block)
            yield (
                last, first, int(steps_S.min()), int(steps_S.max()), part, table, steps_S.tobytes(),
                encode_floats(np.stack([row[3] for row in block])),
                encode_integers(np.stack([row[4] for row in block]), sizes[table]),
            )  # fmt: skip


def scalar_block(first: int, logged: LoggedValues, last: int = 0) -> tuple[Any, ...]:
    """Return the row of a block of scalars: ``first`` is the number of its first value.

    ``last`` is that of the last one that it stands for, where fewer are left of them.
    """
    count = len(logged.steps)
    row = last or first + count - 1, first, count, int(logged.steps.max()), *encode_scalars(logged)
    return sealed("scalar", row)
