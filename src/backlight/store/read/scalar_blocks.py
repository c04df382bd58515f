"""Blocks of scalars of a database, checked."""

from __future__ import annotations

import contextlib
from typing import Any

from backlight.store.errors import RunFormatError
from backlight.store.format.encoding import BLOCK_VALUES, LoggedValues, decode_scalars
from backlight.store.format.schema import TYPES, block_checksum
from backlight.store.read.snapshot import Snapshot

_COLUMNS = ", ".join(TYPES["scalar"])
_TYPES = [*TYPES["scalar"].values()]


def read(snapshot: Snapshot, last: int, after: int) -> tuple[LoggedValues, int]:
    """Return the sound values after the first ``after`` and up to ``last``, and how many are not sound."""
    # A living writer adds to the last block, whose id grows with it.
    select = f"SELECT {_COLUMNS} FROM scalar WHERE id > {after} AND first <= {last}"
    rows, _ = snapshot.salvage(select, max(last + BLOCK_VALUES, highest(snapshot, "scalar", "id")))
    parts, missing = [], last - after
    for row in rows:
        block = _block(row)
        if block is not None:
            first, end = max(row[1], after + 1), min(row[0], last) + 1
            parts.append(block.between(first - row[1], end - row[1]))
            missing -= end - first
    return LoggedValues.join(parts), max(missing, 0)


def read_last(snapshot: Snapshot, last: int) -> LoggedValues:
    """Return the values of the block with value ``last``, up to it; none where it is not sound."""
    with contextlib.suppress(RunFormatError):
        for row in snapshot.rows(f"SELECT {_COLUMNS} FROM scalar WHERE id >= {last} ORDER BY id LIMIT 1"):
            if (block := _block(row)) is not None:
                return block.between(0, last + 1 - row[1])
    return LoggedValues.of([])


def is_thinned(snapshot: Snapshot, after: int) -> bool:
    """Return whether a block behind the first ``after`` values holds fewer than it stands for."""
    select = f"SELECT 1 FROM scalar WHERE id > {after} AND count < id - first + 1 LIMIT 1"
    with contextlib.suppress(RunFormatError):
        return bool(snapshot.rows(select))
    return False


def has_sound(snapshot: Snapshot, step: int) -> bool:
    """Return whether a block whose highest step is ``step`` is sound."""
    try:
        rows = snapshot.rows(f"SELECT {_COLUMNS} FROM scalar WHERE step = {step} LIMIT 1")
    except RunFormatError:
        return False
    return all(_block(row) is not None for row in rows)


def highest(snapshot: Snapshot, table: str, column: str) -> int:
    """Return the highest number in a column of a table, -1 where it cannot be read."""
    with contextlib.suppress(RunFormatError):
        ((found,),) = snapshot.rows(f"SELECT max({column}) FROM {table}")
        return found if isinstance(found, int) else -1
    return -1


def _block(row: tuple[Any, ...]) -> LoggedValues | None:
    """Return the values of a row, None where its types, checksum or bytes are wrong."""
    if not all(map(isinstance, row, _TYPES)) or row[4] != block_checksum(*row[:4], *row[5:]):
        return None
    if row[2] > row[0] - row[1] + 1:  # fewer, where old steps were thinned
        return None
    with contextlib.suppress(RunFormatError):
        return decode_scalars(row[2], *row[5:])
    return None
