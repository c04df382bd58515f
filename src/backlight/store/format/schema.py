"""The format of a run directory as tables: every series, its columns, units, how ranks join, SQL.

A series row is one recorded step: a float64 blob ``[P, floats]`` and an int64 blob ``[P, ints]``, with the id
of the parameter table that names its P rows. Everything that reads or writes numbers goes by these tables; a
change to them is a new ``FORMAT_VERSION``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FORMAT_VERSION = 4
"""Format that this release writes and reads."""


class Join(enum.StrEnum):
    """Reduction of the values of one parameter on several ranks to one. MAX keeps NaN."""

    ROOT_SUM_SQUARES = "root_sum_squares"
    MAX = "max"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Column:
    """One number per row of a series."""

    name: str
    unit: str
    join: Join
    meaning: str
    integer: bool = False


@dataclass(frozen=True, slots=True)
class Derived:
    """A column that is not stored but computed by the reader."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class SeriesSchema:
    """The columns of a series; the integer column ``measured`` (0 or 1) is always the first."""

    name: str
    columns: tuple[Column, ...]
    derived: tuple[Derived, ...] = ()

    @property
    def floats(self) -> tuple[str, ...]:
        """Names of the float64 columns, in the order of the blob."""
        return tuple(c.name for c in self.columns if not c.integer)

    @property
    def integers(self) -> tuple[str, ...]:
        """Names of the int64 columns, in the order of the blob."""
        return tuple(c.name for c in self.columns if c.integer)


def _int(name: str, meaning: str) -> Column:
    return Column(name, "1", Join.SUM, meaning, integer=True)


_MEASURED = Column(
    "measured",
    "1",
    Join.MAX,
    "1 where this row was measured at this step, else 0 and every other column is void",
    integer=True,
)

GRADIENT = SeriesSchema(
    "gradient",
    (
        Column("norm", "gradient", Join.ROOT_SUM_SQUARES, "L2 norm, accumulated in float64"),
        Column("max_abs", "gradient", Join.MAX, "largest absolute value; NaN if any value is NaN"),
        Column("sum", "gradient", Join.SUM, "sum of the values, accumulated in float64"),
        _MEASURED,
        _int("numel", "scalars in the local tensor"),
        _int("zeros", "values that are exactly zero"),
        _int("nan", "values that are NaN"),
        _int("inf", "values that are infinite"),
    ),
    (
        Derived("rms", "gradient", "norm / sqrt(numel)"),
        Derived("mean", "gradient", "sum / numel"),
        Derived("non_finite", "1", "nan + inf"),
        Derived("zero_share", "1", "zeros / numel"),
    ),
)

UPDATE = SeriesSchema(
    "update",
    (
        Column("update_norm", "weight", Join.ROOT_SUM_SQUARES, "L2 norm of the step taken, sampled"),
        Column("weight_norm", "weight", Join.ROOT_SUM_SQUARES, "L2 norm of the same weights before"),
        _MEASURED,
        _int("sampled", "weights in the fixed strided sample"),
        _int("numel", "weights in the tensor; the numbers are exact where sampled = numel"),
    ),
    (Derived("ratio", "1", "update_norm / weight_norm"),),
)

HISTOGRAM_LOWEST = -40
"""Exponent of the first bin: bin i counts 2^(LOWEST+i) <= |g| < 2^(LOWEST+i+1)."""

HISTOGRAM_BINS = 64
"""Bins of the exponent histogram; the first and the last also take what lies beyond."""

HISTOGRAM = SeriesSchema(
    "histogram",
    (
        _MEASURED,
        *(_int(f"b{i:02d}", f"values with exponent {HISTOGRAM_LOWEST + i}") for i in range(HISTOGRAM_BINS)),
    ),
)

SERIES: dict[str, SeriesSchema] = {s.name: s for s in (GRADIENT, UPDATE, HISTOGRAM)}
"""Every per-parameter series of the format, by name."""


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

TABLES: dict[str, str] = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "parameter_table": "CREATE TABLE parameter_table (id INTEGER PRIMARY KEY, json TEXT NOT NULL,"
    " crc INTEGER NOT NULL)",
    "scalar_name": "CREATE TABLE scalar_name (id INTEGER PRIMARY KEY, source TEXT NOT NULL,"
    " name TEXT NOT NULL, crc INTEGER NOT NULL)",
    "scalar": "CREATE TABLE scalar (id INTEGER PRIMARY KEY, first INTEGER NOT NULL, count INTEGER NOT NULL,"
    " step INTEGER NOT NULL, crc INTEGER NOT NULL, floats BLOB NOT NULL, ints BLOB NOT NULL)",
    "event": "CREATE TABLE event (id INTEGER PRIMARY KEY, step INTEGER, time REAL NOT NULL,"
    " kind TEXT NOT NULL, payload TEXT NOT NULL, crc INTEGER NOT NULL)",
    "finding": "CREATE TABLE finding (id INTEGER PRIMARY KEY, time REAL NOT NULL, json TEXT NOT NULL,"
    " crc INTEGER NOT NULL)",
    **{
        f"series_{name}": f"CREATE TABLE series_{name} (id INTEGER PRIMARY KEY, part INTEGER NOT NULL,"
        " step INTEGER NOT NULL, parameters INTEGER NOT NULL, crc INTEGER NOT NULL, floats BLOB NOT NULL,"
        " ints BLOB NOT NULL)"
        for name in SERIES
    },
}
"""Every table of a database. A row of ``scalar`` is a block: ``first`` and ``id`` are the numbers of its
first and last value, counted from 1 in the order of logging, and ``step`` is the highest of its steps."""

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
