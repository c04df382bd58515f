"""The tables of ``rank-NNNNN.db`` and the connection that writes them."""

from __future__ import annotations

import contextlib
import ctypes
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backlight.store.format.schema import FORMAT_VERSION, SERIES
from backlight.store.platform import atomic_json
from backlight.store.write.batch import Batch, stored_rows

SQLITE_VERSION = sqlite3.sqlite_version
"""Release of the SQLite library in use."""

PAGE_SIZE = 32768
"""Bytes per page: rows of 150 parameters take 3 to 10 KB, and leave little of such a page empty."""

CHECKPOINT_PAGES = 128
"""Pages in the write-ahead log before SQLite moves them into the file: 4 MB."""

SYNC_INTERVAL = 30.0
"""Seconds after which what was written is forced onto the disk, against a power cut; a kill needs none."""

CLOSE_PATIENCE = 2.0
"""Seconds that closing waits for readers before it leaves the log beside the file."""

TABLES: dict[str, str] = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "parameter_table": "CREATE TABLE parameter_table (id INTEGER PRIMARY KEY, json TEXT NOT NULL)",
    "scalar_name": "CREATE TABLE scalar_name (id INTEGER PRIMARY KEY, source TEXT NOT NULL,"
    " name TEXT NOT NULL)",
    "scalar": "CREATE TABLE scalar (id INTEGER PRIMARY KEY, name INTEGER NOT NULL, step INTEGER NOT NULL,"
    " value REAL)",
    "event": "CREATE TABLE event (id INTEGER PRIMARY KEY, step INTEGER, time REAL NOT NULL,"
    " kind TEXT NOT NULL, payload TEXT NOT NULL)",
    "finding": "CREATE TABLE finding (id INTEGER PRIMARY KEY, time REAL NOT NULL, json TEXT NOT NULL)",
    **{
        f"series_{name}": f"CREATE TABLE series_{name} (id INTEGER PRIMARY KEY, part INTEGER NOT NULL,"
        " step INTEGER NOT NULL, parameters INTEGER NOT NULL, crc INTEGER NOT NULL, floats BLOB NOT NULL,"
        " ints BLOB NOT NULL)"
        for name in SERIES
    },
}
"""Every table. A NULL in ``scalar.value`` is a NaN that was logged: SQLite knows no NaN."""

COUNTED = tuple(name for name in TABLES if name != "meta")
"""Tables whose rows only grow; the highest id of each says how far a file goes."""

DATABASE_KIND = "backlight rank database"


class VanishedError(OSError):
    """The file that is being written is no longer there under its name."""


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for writing, creating it where it is missing; a sqlite3.Error passes through."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rwc",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=CLOSE_PATIENCE,
    )


def lay_out(path: Path, meta: Mapping[str, str]) -> None:
    """Create an empty database that appears complete; a sqlite3.Error or OSError passes through."""
    temporary = atomic_json.temporary_name(path)
    try:
        connection = connect(temporary)
        try:
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            connection.execute("PRAGMA journal_mode = OFF")
            create_tables(connection, meta)
        finally:
            connection.close()
        atomic_json.publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create_tables(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """Lay out an empty database in one transaction; a sqlite3.Error passes through."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES.values():
        connection.execute(statement)
    values = {"kind": DATABASE_KIND, "format": str(FORMAT_VERSION), **meta}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", list(values.items()))
    connection.execute("COMMIT")


class RankDatabase:
    """The database that one rank writes; the caller sees to it that one thread at a time is inside."""

    def __init__(self, path: Path, meta: Mapping[str, str], checkpoint_pages: int = CHECKPOINT_PAGES) -> None:
        self.path = path
        self.last: dict[str, int] = dict.fromkeys(COUNTED, 0)
        lay_out(path, meta)
        self._connection = connect(path)
        self._synced = time.monotonic()
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
            self._connection.execute(f"PRAGMA journal_size_limit = {2 * checkpoint_pages * PAGE_SIZE}")
            self._inode = self.path.stat().st_ino
        except BaseException:
            self._connection.close()
            raise

    def write(self, batch: Batch, sizes: Mapping[int, npt.NDArray[np.int64]]) -> None:
        """Write a batch as one transaction, or nothing of it.

        A sqlite3.Error or OSError passes through.

        Raises
        ------
        VanishedError
            If the file was deleted or its folder moved: SQLite would go on into nothing without a word.
        """
        self.check_there()
        rows: dict[str, list[tuple[object, ...]]] = {
            "parameter_table": list(batch.tables),
            "scalar_name": list(batch.names),
            "scalar": list(batch.scalars),
            "event": list(batch.events),
            "finding": list(batch.findings),
            **{f"series_{name}": list(stored_rows(found, sizes)) for name, found in batch.series.items()},
        }
        many = self._connection.executemany
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            many("INSERT INTO parameter_table VALUES (?, ?)", rows["parameter_table"])
            many("INSERT INTO scalar_name VALUES (?, ?, ?)", rows["scalar_name"])
            many("INSERT INTO scalar (name, step, value) VALUES (?, ?, ?)", rows["scalar"])
            many("INSERT INTO event (step, time, kind, payload) VALUES (?, ?, ?, ?)", rows["event"])
            many("INSERT INTO finding (time, json) VALUES (?, ?)", rows["finding"])
            for name in SERIES:
                many(
                    f"INSERT INTO series_{name} (part, step, parameters, crc, floats, ints)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    rows[f"series_{name}"],
                )
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite itself rolls back on a full disk; a second rollback would then only complain.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        for name, written in rows.items():
            self.last[name] += len(written)
        if time.monotonic() - self._synced > SYNC_INTERVAL:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._synced = time.monotonic()

    def check_there(self) -> None:
        """Look whether the file is still the one that was created.

        Raises
        ------
        VanishedError
            If it is not.
        """
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

        Where a reader is in the way, the log stays beside the file, which loses nothing.
        """
        try:
            self.check_there()
            # A reader in the way is answered by the row of the first and by an error of the second.
            busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                with contextlib.suppress(sqlite3.OperationalError):
                    self._connection.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._connection.close()

    def abandon(self) -> None:
        """In a forked child: keep the parent's connection from ever being closed or used here.

        Closing it would run a checkpoint on files that the parent is writing.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
