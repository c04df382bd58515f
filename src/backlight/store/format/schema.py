"""The format of a run directory as tables: its version, the SQL, scalars, and kinds of events.

A series row is one recorded step: a float64 blob ``[P, floats]`` and an int64 blob ``[P, ints]`` of the
columns of :mod:`backlight.series`, with the id of the parameter table that names its P rows. Everything that
reads or writes numbers goes by these tables; a change to them is a new ``FORMAT_VERSION``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from backlight.series import SERIES

FORMAT_VERSION = 4
"""Format that this release writes and reads."""


@dataclass(frozen=True, slots=True)
class ScalarSchema:
    """A scalar that backlight itself records per step. Scalars of the user have no schema."""

    name: str
    unit: str
    meaning: str


SCALARS: dict[str, ScalarSchema] = {
    s.name: s
    for s in (
        ScalarSchema("loss", "loss", "sum of the losses given to the backward passes of the step"),
        ScalarSchema("losses", "1", "losses that ``loss`` is the sum of, where nothing divided them"),
        ScalarSchema("lr", "1", "learning rate; one scalar lr/<optimizer>/<group> per group"),
        ScalarSchema("total_norm", "gradient", "L2 norm over all parameters, each tensor once"),
        ScalarSchema("clip/norm", "gradient", "total norm before clipping"),
        ScalarSchema("clip/limit", "gradient", "max_norm (or the clip value) in use"),
        ScalarSchema("clip/factor", "1", "factor that clipping applied; 1 where inactive"),
        ScalarSchema("clip/by_total", "1", "1 where clipping used the total norm of all shards, else absent"),
        ScalarSchema("scaler/scale", "1", "loss scale that the gradients were divided by"),
        ScalarSchema("scaler/skipped", "1", "1 where the scaler skipped the step, else 0"),
        ScalarSchema("batch", "1", "index of the last batch from a DataLoader"),
        ScalarSchema("backwards", "1", "backward passes in the step (accumulation)"),
        ScalarSchema("forwards", "1", "forwards of the outermost modules in the step, under grad"),
        ScalarSchema("addends", "1", "values that the losses of the step add up; a mean is one"),
        ScalarSchema("backwards_seen", "1", "backward passes since watching began; ranks are aligned by it"),
        ScalarSchema("cost", "s", "processor and device time of backlight since the recorded step before"),
        ScalarSchema("time", "s", "wall-clock time at the end of the step, Unix epoch"),
        ScalarSchema("phase", "s", "time per phase; one scalar phase/<phase> each"),
        ScalarSchema("optimizer_time", "s", "time per optimizer of several; optimizer_time/<number> each"),
    )
}
"""Scalars of backlight, by name or by the part before the first slash."""


EVERY_STEP = frozenset({"loss", "lr", "clip/norm"})
"""Scalars that are recorded at every step, by name, by the part before the first slash or before the last."""


def is_of_every_step(name: str) -> bool:
    """Return whether a scalar of backlight is recorded at every step, whatever is sampled beyond."""
    return bool({name, name.split("/", maxsplit=1)[0], name.rpartition("/")[0]} & EVERY_STEP)


ARRAY_ENCODINGS: dict[str, int] = {"plain": 1, "bf16": 1}
"""Encodings of a stored array with the version that this release writes.

``plain`` is the array as it is; ``bf16`` are the 16 bits of bfloat16 in uint16: HDF5 and numpy have no such
type.
"""

COMPRESSIONS = ("gzip", "lzf", "none")
"""Compressions of stored arrays."""

DATABASE_KIND = "backlight rank database"

_BLOBS = "crc INTEGER NOT NULL, floats BLOB NOT NULL, ints BLOB NOT NULL"
_DECLARED = {
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "parameter_table": "id INTEGER PRIMARY KEY, json TEXT NOT NULL, crc INTEGER NOT NULL",
    "scalar_name": "id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, crc INTEGER NOT NULL",
    "scalar": "id INTEGER PRIMARY KEY, first INTEGER NOT NULL, count INTEGER NOT NULL, step INTEGER NOT NULL,"
    f" {_BLOBS}",
    "event": "id INTEGER PRIMARY KEY, step INTEGER, time REAL NOT NULL, kind TEXT NOT NULL,"
    " payload TEXT NOT NULL, crc INTEGER NOT NULL",
    "finding": "id INTEGER PRIMARY KEY, time REAL NOT NULL, json TEXT NOT NULL, crc INTEGER NOT NULL",
    **{
        f"series_{name}": "id INTEGER PRIMARY KEY, part INTEGER NOT NULL, step INTEGER NOT NULL,"
        f" parameters INTEGER NOT NULL, {_BLOBS}"
        for name in SERIES
    },
}

TABLES: dict[str, str] = {name: f"CREATE TABLE {name} ({columns})" for name, columns in _DECLARED.items()}
"""Every table of a database. A row of ``scalar`` is a block: ``first`` and ``id`` are the numbers of its
first and last value, counted from 1 in the order of logging, and ``step`` is the highest of its steps."""

_TYPES = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}

TYPES: dict[str, dict[str, Any]] = {
    table: {
        name: _TYPES[kind] if rest else (_TYPES[kind], NoneType)
        for name, kind, *rest in (column.split() for column in columns.split(", "))
    }
    for table, columns in _DECLARED.items()
}
"""Types of the columns of each table, in order: SQLite itself enforces none."""

COUNTED = tuple(name for name in TABLES if name != "meta")
"""Tables to which rows are only added; the highest id of each is how far a file goes."""


def unit_of_scalar(name: str, source: str = "backlight") -> str:
    """Return the unit of a scalar; that of the user's scalars is not known and reads as ``1``."""
    schema = SCALARS.get(name) or SCALARS.get(name.split("/", maxsplit=1)[0])
    return schema.unit if schema is not None and source == "backlight" else "1"


THINNED = "thinned"
"""Event with the step ``before`` which scalars of every step are means of ``every`` steps."""

COST = "cost"
"""Kind of the events with the seconds that the start and the end of a watch took, by part."""

EVALUATED = "evaluated"
"""Event of a run whose rules were evaluated when it ended: findings that are not stored do not exist."""

REPORTED = "reported"
"""Event of a finding that was reported while the run went on."""

DROPPED = "dropped"
"""Event of recorded steps for which the queue of the writer thread had no space."""

NOT_STORED = "not_stored"
"""Event of rows that were not stored, by table, and why."""

DISK_LIMIT = "disk_limit"
"""Event of a run that stores fewer of its recorded steps, or none, to stay within ``max_disk``."""

EXCEPTION = "exception"
"""Event of a run that an exception ended, with its type and message."""

REQUIRES_GRAD = "requires_grad"
"""Kind of the event with ``parameters`` whose ``requires_grad`` became ``value``, each of both once."""

ENDED = "ended"
"""Event of a process that a signal ended on purpose, written by its watchdog: ``rank``, and ``how``."""

STOPPED = "stopped"
"""Event of a run that a finding ended by ``stop_on``, with its rule and title."""

WATCHDOG_RANK = -1
"""Rank of the watchdog's events and findings for a reader: they belong to no rank."""


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


def series_checksum(part: int, step: int, table: int, floats: bytes, integers: bytes) -> int:
    """Return the CRC-32 over a row of a series: part, step and table as three int64, then its blobs."""
    return zlib.crc32(integers, zlib.crc32(floats, zlib.crc32(_SERIES_KEY.pack(part, step, table))))


def block_checksum(row: int, first: int, count: int, step: int, floats: bytes, integers: bytes) -> int:
    """Return the CRC-32 over a block of scalars: its leading columns as int64, then its blobs."""
    return zlib.crc32(
        integers, zlib.crc32(floats, zlib.crc32(_NUMBERS["scalar"].pack(row, first, count, step)))
    )


def row_checksum(table: str, values: Sequence[Any]) -> int:
    """Return the CRC-32 over the columns of a row of another table, the id included and the checksum not."""
    numbers, count = _NUMBERS[table], len(_NUMBERS[table].format) - 1
    crc = zlib.crc32(numbers.pack(*(_NO_STEP if value is None else value for value in values[:count])))
    for text in values[count:]:
        crc = zlib.crc32(text.encode("utf-8", "surrogatepass") + b"\0", crc)
    return crc
