"""The SQLite database that one rank writes: waiting rows, the connection, and the limit of its size."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sqlite3
import stat
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from backlight import atomic_files, clock, codec, processes
from backlight.series import SERIES
from backlight.store.connections import CALLS, Connection, connect
from backlight.store.errors import RunFormatError
from backlight.store.format import row_codec
from backlight.store.format.names import database_name, segment_name
from backlight.store.format.row_codec import (
    BLOCK_VALUES,
    LoggedValues,
    Row,
    Sizes,
    decode_scalars,
    scalar_block,
    sealed,
    series_blocks,
)
from backlight.store.format.schema import (
    DATABASE_KIND,
    FORMAT_VERSION,
    ROWS,
    TABLES,
    THINNED,
    TYPES,
    is_of_every_step,
)

SQLITE_VERSION = sqlite3.sqlite_version
"""Release of the SQLite library in use."""

PAGE_BYTES = 32768
"""A flush of 150 parameters takes 3 to 10 KB a step, and leaves little of such a page empty."""

CHECKPOINT_PAGES = 128
"""Pages in the write-ahead log before SQLite moves them into the file: 4 MB."""

MAX_FAILURES = 3
"""Writes in a row that may fail before the recording ends."""

SYNC_INTERVAL_S = 30.0
"""Interval in which rows are forced onto the disk, against a power cut; a kill needs none."""

BUSY_TIMEOUT_S = 2.0
"""Wait for readers when closing, before the log stays next to the file."""

MAX_STRIDE = 4**10
"""Beyond it nothing more of a step is stored."""

DECIDED_STEPS = 64
"""Steps of which it is remembered whether they are stored: some numbers come late from a device."""

SCALAR_BYTES = 32
"""Bytes of a scalar that waits; it takes fewer on the disk."""


_INSERTS = {table: f"INSERT INTO {table} VALUES ({', '.join('?' * len(TYPES[table]))})" for table in ROWS}


class UnpublishedError(OSError):
    """A batch is written, but the segment that was due is not published: it is with the next write."""


class VanishedError(OSError):
    """The file that is being written no longer exists under its name, or is no longer open."""


@dataclass(slots=True)
class Batch:
    """Rows of every kind that wait for a flush, in the order in which they came."""

    tables: list[tuple[int, str]] = field(default_factory=list)
    names: list[tuple[int, str, str]] = field(default_factory=list)
    scalars: list[tuple[int, int, float]] = field(default_factory=list)
    events: list[tuple[int | None, float, str, str]] = field(default_factory=list)
    findings: list[tuple[float, str]] = field(default_factory=list)
    series: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in SERIES})
    bytes: int = 0

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        lists = (self.tables, self.names, self.scalars, self.events, self.findings, *self.series.values())
        return any(lists)

    def followed_by(self, later: Batch) -> Batch:
        """Return a batch with the rows of this one and then those of ``later``."""
        return Batch(
            self.tables + later.tables, self.names + later.names, self.scalars + later.scalars,
            self.events + later.events, self.findings + later.findings,
            {name: rows + later.series[name] for name, rows in self.series.items()},
            self.bytes + later.bytes,
        )  # fmt: skip

    def last_step(self) -> int:
        """Return the highest attempt-local step in it, -1 where there is none."""
        steps = [row[1] for rows in self.series.values() for row in rows]
        return max([*steps, *(row[1] for row in self.scalars)], default=-1)

    def rows(self, sizes: Sizes, last: Mapping[str, int]) -> dict[str, list[tuple[Any, ...]]]:
        """Return the rows but those of scalars as they are stored, by table; ``last`` gives the last ids."""
        rows: dict[str, list[tuple[Any, ...]]] = {
            "parameter_table": [*self.tables],
            "scalar_name": [*self.names],
            "event": [(i, *row) for i, row in enumerate(self.events, last["event"] + 1)],
            "finding": [(i, *row) for i, row in enumerate(self.findings, last["finding"] + 1)],
        }
        for name, steps in self.series.items():
            table = f"series_{name}"
            rows[table] = list(series_blocks(steps, sizes, last[table]))
        return {table: [sealed(table, row) for row in rows_of_table] for table, rows_of_table in rows.items()}


def _connect(path: Path) -> Connection:
    """Open a database for writing, creating it where it is missing; a sqlite3.Error passes through."""
    return connect(f"{path.absolute().as_uri()}?mode=rwc", BUSY_TIMEOUT_S)


def create_tables(connection: Connection, meta: Mapping[str, str]) -> None:
    """Create all tables in one transaction; a sqlite3.Error passes through."""
    connection.query("BEGIN IMMEDIATE")
    for statement in TABLES.values():
        connection.query(statement)
    values = {"kind": DATABASE_KIND, "format": str(FORMAT_VERSION), **meta}
    connection.insert("INSERT INTO meta VALUES (?, ?)", list(values.items()))
    connection.query("COMMIT")


def _create(path: Path, meta: Mapping[str, str]) -> None:
    """Create an empty database that appears complete, by a rename."""
    with atomic_files.replacing(path) as temporary:
        temporary.open("xb").close()
        with contextlib.closing(_connect(temporary)) as connection:
            connection.query(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.query("PRAGMA journal_mode = OFF")
            create_tables(connection, meta)


class Database(Protocol):
    """Where rows are written."""

    def check_exists(self) -> None:
        """Raise an OSError unless the files still exist."""


class RankDatabase:
    """The database that one rank writes; the caller makes sure that one thread at a time uses it."""

    def __init__(self, path: Path, meta: Mapping[str, str], checkpoint_pages: int = CHECKPOINT_PAGES) -> None:
        self.path = path
        self.last: dict[str, int] = dict.fromkeys(ROWS, 0)
        self._unfilled = LoggedValues.of([])
        self._of_every_step: set[int] = set()
        self._next_thinning = 2 * row_codec.WHOLE_STEPS
        self._checkpoint_pages = checkpoint_pages
        _create(path, meta)
        self._inode = self.path.stat().st_ino
        self._synced = clock.monotonic()
        self._open()
        _databases.add(self)

    def _open(self) -> None:
        # A thread that reads the run has descriptors of the same files, and will close them.
        with CALLS:
            others = processes.open_descriptors()
            self._connection = _connect(self.path)
            try:
                self._run("PRAGMA journal_mode = WAL")
                self._run("PRAGMA synchronous = NORMAL")
                self._run(f"PRAGMA wal_autocheckpoint = {self._checkpoint_pages}")
                self._run(f"PRAGMA journal_size_limit = {2 * self._checkpoint_pages * PAGE_BYTES}")
                self._run("SELECT 1 FROM meta")  # opens the log
                files = (self.path.with_name(self.path.name + suffix) for suffix in ("", "-wal", "-shm"))
                self._files = processes.HeldFiles(*files, others=others)
            except BaseException:
                self._connection.close()
                raise

    def reopen(self) -> None:
        """Open the file anew after a failed write; a sqlite3.Error or OSError passes through."""
        self.check_exists()
        self._files.release()
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        self._open()

    def _run(self, statement: str) -> list[tuple[Any, ...]]:
        return self._connection.query(statement)

    def write(self, batch: Batch, sizes: Sizes) -> None:
        """Write a batch as one transaction, or nothing of it; a sqlite3.Error or OSError passes through."""
        self.check_exists()
        self._of_every_step.update(
            i for i, source, name in batch.names if source == "backlight" and is_of_every_step(name)
        )
        # The last block is written anew until it is full: one for each flush would be mostly overhead.
        logged = LoggedValues.join([self._unfilled, LoggedValues.of(batch.scalars)])
        written_before = self.last["scalar"] - len(self._unfilled.steps)
        blocks = logged.split(BLOCK_VALUES)
        newest = int(logged.steps.max(initial=-1))
        is_due = newest >= self._next_thinning
        thinned, event = self._thin(newest, written_before) if is_due else ([], Batch())
        rows = (batch.followed_by(event) if event else batch).rows(sizes, self.last)
        rows["scalar"] = thinned + [
            scalar_block(written_before + 1 + i * BLOCK_VALUES, block) for i, block in enumerate(blocks)
        ]
        self._run("BEGIN IMMEDIATE")
        try:
            self._run(f"DELETE FROM scalar WHERE id > {written_before}")
            if thinned:
                self._run(f"DELETE FROM scalar WHERE id <= {thinned[-1][0]}")
            for table, insert in _INSERTS.items():
                self._connection.insert(insert, rows[table])
            self._run("COMMIT")
        except BaseException:
            # SQLite itself rolls back on a full disk; a second rollback then only fails.
            with contextlib.suppress(sqlite3.Error):
                self._run("ROLLBACK")
            raise
        self.last |= {table: written[-1][0] for table, written in rows.items() if written}
        if blocks:
            is_full = len(blocks[-1].steps) == BLOCK_VALUES
            self._unfilled = LoggedValues.of([]) if is_full else blocks[-1]
        if is_due:
            self._next_thinning = newest + row_codec.WHOLE_STEPS
        if clock.monotonic() - self._synced > SYNC_INTERVAL_S:
            with contextlib.suppress(sqlite3.Error):  # the rows are written, and must not be so twice
                self._run("PRAGMA wal_checkpoint(PASSIVE)")
            self._synced = clock.monotonic()

    def _thin(self, newest: int, written: int) -> tuple[list[tuple[Any, ...]], Batch]:
        """Return the blocks that replace old ones of the first ``written`` values, and the event of it."""
        before = newest - row_codec.WHOLE_STEPS
        ((last,),) = self._run(f"SELECT max(id) FROM scalar WHERE step < {before} AND id <= {written}")
        stored = self._run(f"SELECT size, floats, ints FROM scalar WHERE id <= {last or 0} ORDER BY id")
        try:
            logged = LoggedValues.join([decode_scalars(*row) for row in stored])
        except RunFormatError:  # what is damaged stays as it is, for the reader to report
            return [], Batch()
        width = row_codec.bin_width(before)
        blocks = row_codec.thin(logged, self._of_every_step, width).split(BLOCK_VALUES)
        rows = [
            scalar_block(1 + i * BLOCK_VALUES, block, last if block is blocks[-1] else 0)
            for i, block in enumerate(blocks)
        ]
        before = int(logged.steps.max(initial=-1)) + 1
        payload = codec.encode_row({"before": before, "every": width})
        return rows, Batch(events=[(newest, clock.unix_time(), THINNED, payload)] if rows else [])

    @property
    def published(self) -> dict[str, dict[str, int]]:
        """The last row of each table, by the name of the file."""
        return {self.path.name: {name: last for name, last in self.last.items() if last}}

    def check_exists(self) -> None:
        """Raise a :class:`VanishedError` unless the file is still the one that was created, and open."""
        if not self._files.are_open():
            raise VanishedError(f"the script has closed the descriptors of {self.path.name}")
        try:
            same = self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            same = False
        if not same:
            raise VanishedError(f"{self.path.name} was deleted or moved away while it was written")

    def size(self) -> int:
        """Return the bytes of the file and its log."""
        total = 0
        for name in (self.path.name, f"{self.path.name}-wal"):
            with contextlib.suppress(OSError):
                total += self.path.with_name(name).stat().st_size
        return total

    def close(self) -> None:
        """Move the log into the file and close; a sqlite3.Error or OSError passes through.

        Where a reader is in the way, the log stays next to the file, which loses nothing.
        """
        if not self._files.release():
            self.abandon()
        try:
            self.check_exists()
            # A reader in the way makes the first return a row that says busy and the second raise.
            ((busy, _, _),) = self._run("PRAGMA wal_checkpoint(TRUNCATE)")
            if not busy:
                with contextlib.suppress(sqlite3.OperationalError):
                    self._run("PRAGMA journal_mode = DELETE")
        finally:
            if self._files.are_open():
                self._connection.close()

    def abandon(self) -> None:
        """Keep the connection from ever being closed or used in this process.

        In a forked child, closing it would run a checkpoint on files that the parent is writing; where the
        script has closed its descriptors, it would act on files of the script.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))


_databases: weakref.WeakSet[RankDatabase] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for database in list(_databases):
        database.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)


_PERMANENT = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}


def is_permanent(error: Exception) -> bool:
    """Return whether another try does not change an error of the disk."""
    if isinstance(error, OSError):
        return isinstance(error, VanishedError) or error.errno in _PERMANENT
    return any(words in str(error) for words in ("disk is full", "readonly database"))


def reason_of(error: Exception, database: Database) -> str:
    """Return why a write failed; where the files are gone, that is the reason, whatever error it led to."""
    try:
        database.check_exists()
    except Exception as gone:  # noqa: BLE001 - only its text is used
        error = gone
    return str(error) if isinstance(error, VanishedError) else f"{type(error).__name__}: {error}"


class DiskBudget:
    """Thins series and scalars so that a run of any length fits: the sparser, the less is left.

    Up to half of the limit every recorded step is stored, up to three quarters every 4th, up to seven
    eighths every 16th, and so on: each halving of what is left lasts twice as long as the one before.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.stride = 1
        self.used = 0
        self._kept: dict[str, tuple[int, dict[int, bool]]] = {}

    def log_pages(self) -> int:
        """Return how many pages a write-ahead log may have, so that it is a small part of the limit."""
        if self.limit is None:
            return CHECKPOINT_PAGES
        return max(4, min(CHECKPOINT_PAGES, self.limit // (32 * PAGE_BYTES)))

    def keeps(self, step: int, source: str = "backlight", pending: int = 0) -> bool:
        """Return whether what a source records of this step is stored: all of it is, or nothing.

        ``pending`` bytes wait to be written.

        Sources have counts of their own: a user may log at other steps than those that are recorded.
        """
        count, decided = self._kept.get(source, (0, {}))
        if step not in decided:
            decided[step] = self.stride > 0 and count % self.stride == 0 and self.fits(pending)
            self._kept[source] = count + 1, decided
            if len(decided) > DECIDED_STEPS:
                del decided[next(iter(decided))]
        return decided[step]

    def fits(self, size: int) -> bool:
        """Return whether ``size`` further bytes are within the limit."""
        return self.limit is None or self.used + size <= self.limit

    def update(self, used: int) -> bool:
        """Set the bytes in use; return whether the stride changed."""
        self.used = used
        before = self.stride
        while self.limit is not None and self.stride and used >= self.limit * (1 - 0.5 / self.stride**0.5):
            self.stride = self.stride * 4 if self.stride < MAX_STRIDE else 0
        return self.stride != before


FIRST_SEGMENT_S = 10.0
"""Time until the first segment, so that a young run can be read."""

SEGMENT_INTERVAL_S = 30.0
"""Time between segments at first."""

_SCRATCH = "backlight-run-"

AGE_SHARE = 1 / 20
"""After that, the share of the age of the run between segments, so that they stay few."""


def is_scratch(folder: Path) -> bool:
    """Return whether a folder is one in which a run of this user keeps its open database."""
    state = folder.stat(follow_symlinks=False)
    is_private = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
    is_own = not hasattr(os, "geteuid") or state.st_uid == os.geteuid()
    return folder.name.startswith(_SCRATCH) and is_private and is_own


class SegmentedDatabase:
    """Counterpart of :class:`~backlight.store.write.database.RankDatabase` for network storage."""

    def __init__(self, folder: Path, rank: int, meta: Mapping[str, str]) -> None:
        self.local = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        self.published: dict[str, dict[str, int]] = {}
        self._folder = folder
        self._rank = rank
        self._meta = dict(meta)
        self._published_bytes = 0
        self._tables: list[tuple[int, str]] = []
        self._names: list[tuple[int, str, str]] = []
        self._began = self._segment_began = clock.monotonic()
        try:
            self._open = RankDatabase(self.path, self._meta)
        except BaseException:
            shutil.rmtree(self.local, ignore_errors=True)
            raise

    @property
    def path(self) -> Path:
        """Path of the open database, outside of the run directory."""
        return self.local / database_name(self._rank)

    def write(self, batch: Batch, sizes: Sizes) -> None:
        """Write a batch and publish a segment where one is due; errors pass through."""
        self._open.write(batch, sizes)
        self._tables += batch.tables
        self._names += batch.names
        now = clock.monotonic()
        due = max(SEGMENT_INTERVAL_S, (now - self._began) * AGE_SHARE) if self.published else FIRST_SEGMENT_S
        if now - self._segment_began >= due:
            try:
                self._publish()
                self._begin_segment()
            except (sqlite3.Error, OSError) as error:  # the batch is written, and must not be so twice
                number = error.errno if isinstance(error, OSError) else None
                raise UnpublishedError(
                    number, f"no segment was published: {error}", str(self._folder)
                ) from error

    def _begin_segment(self) -> None:
        self._open = RankDatabase(self.path, self._meta)
        # Each segment can be read alone, so it repeats the tables that its rows refer to.
        self._open.write(Batch(tables=list(self._tables), names=list(self._names)), {})
        self._segment_began = clock.monotonic()

    def _publish(self) -> None:
        """Close the open database and copy it, complete, into the run directory."""
        last = dict(self._open.last)
        self._open.close()
        segment = self._folder / segment_name(self._rank, len(self.published))
        atomic_files.copy(self.path, segment)
        self.published[segment.name] = last
        self._published_bytes += segment.stat().st_size
        self.path.unlink()

    def reopen(self) -> None:
        """Open the database anew after a failed write; errors pass through."""
        if self.path.exists():
            self._open.reopen()
        else:  # it was published, and no new one was created
            self._begin_segment()

    def check_exists(self) -> None:
        """Raise an OSError unless the open database and the run directory still exist."""
        self._open.check_exists()
        self._folder.stat()

    def size(self) -> int:
        """Return the bytes of all segments and of the open database."""
        return self._published_bytes + self._open.size()

    def close(self) -> None:
        """Publish the open database, then remove the local folder; errors pass through."""
        self._publish()
        shutil.rmtree(self.local, ignore_errors=True)
