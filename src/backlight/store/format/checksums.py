"""CRC-32 of the rows of a database, as the writer stores them and the reader compares them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from types import NoneType
from typing import Any

from backlight.store.format.schema import TYPES

_SERIES_KEY = struct.Struct("<qqq")

_CODES = {int: "q", (int, NoneType): "q", float: "d"}

_NUMBERS = {
    table: struct.Struct(
        "<" + "".join(_CODES.get(kind, "") for name, kind in columns.items() if name != "crc")
    )
    for table, columns in TYPES.items()
}
"""Layout of the leading columns of each table, which are numbers; the others are text."""

_NO_STEP = -(2**63)


def of_series_row(part: int, step: int, table: int, floats: bytes, integers: bytes) -> int:
    """Return the CRC-32 over a row of a series: part, step and table as three int64, then its blobs."""
    return zlib.crc32(integers, zlib.crc32(floats, zlib.crc32(_SERIES_KEY.pack(part, step, table))))


def of_block(row: int, first: int, count: int, step: int, floats: bytes, integers: bytes) -> int:
    """Return the CRC-32 over a block of scalars: its leading columns as int64, then its blobs."""
    return zlib.crc32(
        integers, zlib.crc32(floats, zlib.crc32(_NUMBERS["scalar"].pack(row, first, count, step)))
    )


def of_row(table: str, values: Sequence[Any]) -> int:
    """Return the CRC-32 over the columns of a row of another table, the id included and the checksum not."""
    numbers, count = _NUMBERS[table], len(_NUMBERS[table].format) - 1
    crc = zlib.crc32(numbers.pack(*(_NO_STEP if value is None else value for value in values[:count])))
    for text in values[count:]:
        crc = zlib.crc32(text.encode("utf-8", "surrogatepass") + b"\0", crc)
    return crc
