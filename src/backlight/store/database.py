"""The tables of ``rank-NNNNN.db``, and how such a file is opened for writing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from backlight.store.schema import SERIES

PAGE_SIZE = 16384
"""Bytes per page: a row of 150 parameters takes 3 KB, and small pages would waste a quarter."""

CHECKPOINT_PAGES = 256
"""Pages in the write-ahead log before SQLite moves them into the file: 4 MB."""

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE parameter_table (id INTEGER PRIMARY KEY, json TEXT NOT NULL)",
    "CREATE TABLE scalar_name (id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL)",
    "CREATE TABLE scalar (id INTEGER PRIMARY KEY, name INTEGER NOT NULL, step INTEGER NOT NULL, value REAL)",
    "CREATE TABLE event (id INTEGER PRIMARY KEY, step INTEGER, time REAL NOT NULL, kind TEXT NOT NULL,"
    " payload TEXT NOT NULL)",
    "CREATE TABLE finding (id INTEGER PRIMARY KEY, time REAL NOT NULL, json TEXT NOT NULL)",
    *(
        f"CREATE TABLE series_{name} (id INTEGER PRIMARY KEY, part INTEGER NOT NULL, step INTEGER NOT NULL,"
        " parameters INTEGER NOT NULL, floats BLOB NOT NULL, ints BLOB NOT NULL)"
        for name in SERIES
    ),
)
"""A NULL in ``scalar.value`` is a NaN that was logged: SQLite knows no NaN."""

COUNTED = ("parameter_table", "scalar_name", "scalar", "event", "finding", *(f"series_{n}" for n in SERIES))
"""Tables whose rows only grow; the highest id of each says how far a file goes."""


def create(path: Path) -> sqlite3.Connection:
    """Create the database of one rank, which must not exist yet.

    Raises
    ------
    sqlite3.Error
        If the file system does not let us.
    """
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rwc",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=10.0,
    )
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("BEGIN IMMEDIATE")
        for statement in TABLES:
            connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection
