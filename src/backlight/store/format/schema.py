"""The format of a run directory as tables: its version, the SQL, scalars, and kinds of events.

A row of a series is a block of recorded steps: a float64 blob ``[S, P, floats]`` and an int64 blob ``[S, P,
ints]`` of the columns of :mod:`backlight.series`, with the id of the parameter table that names its P rows.
A row is written by one flush and has one checksum. Everything that reads or writes numbers goes by these
tables; a change to them is a new ``FORMAT_VERSION``.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

from backlight.series import SERIES

FORMAT_VERSION = 5
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


_NUMBERED = re.compile(r"(lr|loss|optimizer_time)/[0-9/]*")


def is_optional_scalar(name: str) -> bool:
    """Return whether backlight records a scalar of that name in some runs; a phase is not one."""
    is_family = name in {"lr", "phase", "optimizer_time"}
    return (name in SCALARS and not is_family) or _NUMBERED.fullmatch(name) is not None


EVERY_STEP = frozenset({"loss", "lr", "clip/norm"})
"""Scalars that are recorded at every step, by name, by the part before the first slash or before the last."""


def is_of_every_step(name: str) -> bool:
    """Return whether a scalar of backlight is recorded at every step, whatever is sampled beyond."""
    return bool({name, name.split("/", maxsplit=1)[0], name.rpartition("/")[0]} & EVERY_STEP)


def is_loss(name: str, source: str) -> bool:
    """Return whether a scalar is a loss that backlight recorded, or the number of losses of a step."""
    return source == "backlight" and name.partition("/")[0] in {"loss", "losses"}


ARRAY_ENCODINGS: dict[str, int] = {"plain": 1, "bf16": 1}
"""Encodings of a stored array with the version that this release writes.

``plain`` is the array as it is; ``bf16`` are the 16 bits of bfloat16 in uint16: HDF5 and numpy have no such
type.
"""

COMPRESSIONS = ("gzip", "lzf", "none")
"""Compressions of stored arrays."""

DATABASE_KIND = "backlight rank database"


class ParameterTableRow(NamedTuple):
    """The rows of the parameter axis in model order."""

    id: int
    json: str
    crc: int


class ScalarNameRow(NamedTuple):
    """A scalar, once."""

    id: int
    source: str
    name: str
    crc: int


class ScalarRow(NamedTuple):
    """A block of ``size`` values: ``first`` and ``id`` number its first and last, ``step`` is the highest."""

    id: int
    first: int
    size: int
    step: int
    floats: bytes
    ints: bytes
    crc: int


class SeriesRow(NamedTuple):
    """A block of recorded steps of one part and parameter table, numbered as in :class:`ScalarRow`.

    ``steps`` holds an int64 for each, from ``lowest`` to ``step``.
    """

    id: int
    first: int
    lowest: int
    step: int
    part: int
    parameters: int
    steps: bytes
    floats: bytes
    ints: bytes
    crc: int


class EventRow(NamedTuple):
    """An event."""

    id: int
    step: int | None
    time: float
    kind: str
    payload: str
    crc: int


class FindingRow(NamedTuple):
    """A finding."""

    id: int
    time: float
    json: str
    crc: int


ROWS: dict[str, type[Any]] = {
    "parameter_table": ParameterTableRow,
    "scalar_name": ScalarNameRow,
    "scalar": ScalarRow,
    "event": EventRow,
    "finding": FindingRow,
    **{f"series_{name}": SeriesRow for name in SERIES},
}
"""Rows of the tables to which a writer only adds; the highest id of each is how far a file goes."""

TYPES: dict[str, dict[str, Any]] = {table: get_type_hints(row) for table, row in ROWS.items()}
"""Types of the columns of each table, in order: SQLite itself enforces none."""

_SQL = {
    int: "INTEGER NOT NULL",
    int | None: "INTEGER",
    float: "REAL NOT NULL",
    str: "TEXT NOT NULL",
    bytes: "BLOB NOT NULL",
}

TABLES: dict[str, str] = {
    name: f"CREATE TABLE {name} ({columns})"
    for name, columns in {
        "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
        **{
            table: ", ".join(
                f"{name} {'INTEGER PRIMARY KEY' if name == 'id' else _SQL[kind]}"
                for name, kind in columns.items()
            )
            for table, columns in TYPES.items()
        },
    }.items()
}
"""Every table of a database."""

_NO_STEP = -(2**63)

_CODES = {int: "q", int | None: "q", float: "d"}

_NUMBERS = {
    table: struct.Struct(
        "<" + "".join(_CODES.get(kind, "") for name, kind in columns.items() if name != "crc")
    )
    for table, columns in TYPES.items()
}
"""Layout of the leading columns of each table, which are numbers; the others are texts or blobs."""


def checksum(table: str, values: Sequence[Any]) -> int:
    """Return the CRC-32 over the columns of a row but the last one, which holds it."""
    numbers, count = _NUMBERS[table], len(_NUMBERS[table].format) - 1
    crc = zlib.crc32(numbers.pack(*(_NO_STEP if value is None else value for value in values[:count])))
    for value in values[count:]:
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass") + b"\0"
        crc = zlib.crc32(data, crc)
    return crc


def is_sound(table: str, row: Sequence[Any]) -> bool:
    """Return whether a row has the types of its table and the checksum that fits."""
    has_types = all(map(isinstance, row, TYPES[table].values()))
    return has_types and row[-1] == checksum(table, row[:-1])


def unit_of_scalar(name: str, source: str = "backlight") -> str:
    """Return the unit of a scalar; that of the user's scalars is not known and reads as ``1``."""
    schema = SCALARS.get(name) or SCALARS.get(name.split("/", maxsplit=1)[0])
    return schema.unit if schema is not None and source == "backlight" else "1"


THINNED = "thinned"
"""Event with the step ``before`` which scalars of every step are means of ``every`` steps."""

STALL = "stall"
"""Rule of the diagnosed stalls, and kind of the event of each."""

STALL_VIEWS = "stall_views"
"""Kind of the events with what the ranks of one machine showed in a stall, which the others join."""

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

STATIC_READING = "static_reading"
"""What a line of the script looked like before it ran: ``rules`` that report it, ``place``, ``title``."""

REPEATED_WRITES = "repeated_writes"
"""Event of writes that failed and were repeated with a new connection, and why: nothing was lost by them."""

SAMPLED_LINES = "sampled_lines"
"""Event with the lines of the user's code that the training thread was seen at, by phase; the last counts."""

SAMPLED_BATCH = "batch"
"""What a line of that event waits for, where it is an iterator; else a function in C, or empty."""

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
