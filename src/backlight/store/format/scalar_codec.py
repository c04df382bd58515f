"""Encoding of scalars in blocks, so that a value of every step takes a few bytes, without loss.

A block holds N values in the order in which they were logged. Its integers are three columns of N rows: the
id of the name, the step less that of the value before, and one code per value. Its floats follow, by name and
within a name in the order of logging: first all that are stored as float32, then those stored as float64.

====  ==================================================================
0     the value is that of the same name before it, bit by bit
1     float32, which the value survives bit by bit
2     float64
====  ==================================================================
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backlight.store.errors import RunFormatError
from backlight.store.format import column_codec

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


def encode(logged: LoggedValues) -> tuple[bytes, bytes]:
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
    (integers,) = column_codec.encode_integers(columns[np.newaxis])
    floats = narrow[codes == _NARROW].astype("<f4").tobytes() + values[codes == _WIDE].astype("<f8").tobytes()
    return floats, zlib.compress(integers, _COMPRESSION_LEVEL)


def decode(count: int, floats: bytes, integers: bytes) -> LoggedValues:
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
    names, deltas, in_order = column_codec.decode_row(plain, "i", count, _COLUMNS)
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
