"""What waits in memory between two flushes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backlight.store.format import column_codec
from backlight.store.format.schema import SERIES

_PLACE = struct.Struct("<qqq")

Row = tuple[int, int, int, npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Part, step, id of the parameter table, floats ``[P, F]``, integers ``[P, I]``."""

StoredRow = tuple[int, int, int, int, bytes, bytes]
"""Part, step, id of the parameter table, checksum, and the two blobs."""


@dataclass(slots=True)
class Batch:
    """Rows of every kind in the order in which they came."""

    tables: list[tuple[int, str]] = field(default_factory=list)
    names: list[tuple[int, str, str]] = field(default_factory=list)
    scalars: list[tuple[int, int, float]] = field(default_factory=list)
    events: list[tuple[int | None, float, str, str]] = field(default_factory=list)
    findings: list[tuple[float, str]] = field(default_factory=list)
    series: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in SERIES})
    bytes: int = 0

    def __bool__(self) -> bool:
        """Tell whether anything waits."""
        return bool(
            self.tables
            or self.names
            or self.scalars
            or self.events
            or self.findings
            or any(self.series.values())
        )

    def last_step(self) -> int:
        """Return the highest attempt-local step in it, -1 where there is none."""
        steps = [row[1] for rows in self.series.values() for row in rows]
        return max([*steps, *(row[1] for row in self.scalars)], default=-1)


def checksum(part: int, step: int, table: int, floats: bytes, integers: bytes) -> int:
    """Return the CRC-32 over a row: its place as three int64, then its blobs."""
    return zlib.crc32(integers, zlib.crc32(floats, zlib.crc32(_PLACE.pack(part, step, table))))


def stored_rows(rows: list[Row], sizes: Mapping[int, npt.NDArray[np.int64]]) -> Iterator[StoredRow]:
    """Encode rows; those that follow each other with one parameter table share their encoding."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i][2] != rows[first][2]:
            group = rows[first:i]
            floats = column_codec.encode_floats(np.stack([row[3] for row in group]))
            ints = column_codec.encode_integers(np.stack([row[4] for row in group]), sizes[group[0][2]])
            for (part, step, table, _, _), f, n in zip(group, floats, ints, strict=True):
                yield part, step, table, checksum(part, step, table, f, n), f, n
            first = i
