"""Queries on a SQLite file that may be live, orphaned by a kill, or on a read-only medium, changing nothing.

Three ways, decided at each query:

- Its writer lives on this machine: the file is opened read-only in place, through its existing shared
  memory, for one short read.
- No process writes it and it has no write-ahead log: it is complete, and opened ``immutable``, which creates
  no other file. Such a connection may be held as long as the file stays as it is.
- No process is known to write it and there is a log: file and log are copied to a temporary folder and the
  copy is opened. ``immutable`` would silently leave out the rows in the log, and opening it in place would
  create files or move the log.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from backlight import atomic_files, processes, untrusted_files
from backlight.store.connections import Connection, connect
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import check_format
from backlight.store.format.schema import DATABASE_KIND, TABLES
from backlight.store.read.remote import new_folder, remove

T = TypeVar("T")
Rows = list[tuple[Any, ...]]

SIDE_FILES = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps next to a database; they are input as the database is."""

_WAL_HEADER_BYTES = 32
_TRIES = 12
_BUSY_TIMEOUT_S = 2.0

MAX_DATABASE_BYTES = 1024**4
"""Larger files are refused."""

_MAX_META_ROWS = 100
_MAX_VALUE_BYTES = 256 * 1024 * 1024


class Snapshot:
    """One database of a run, queried without leaving a trace.

    ``live``: a process on this machine still writes it; ``own``: it is this very process. Its file is then
    only opened through SQLite: closing any other handle would drop the writer's locks. ``hold``: keep the
    connection to a complete file open between queries.
    """

    def __init__(self, path: Path, *, live: bool = False, is_own: bool = False, hold: bool = False) -> None:
        self.path = path
        self._uri = path.absolute().as_uri()
        self._log = sibling(path, "-wal")
        self.live = live
        self._is_own = is_own
        self._hold = hold
        self._open: tuple[object, Connection] | None = None
        self._lock = threading.RLock()
        self._copy: Path | None = None
        self._check_files()
        # A foreign database could make our queries run what it likes: it is refused before any of them.
        tables, meta = self.read(_described)
        self.meta: dict[str, Any] = meta
        if "CREATE TABLE meta" not in tables.get("meta", ""):
            raise RunFormatError(f"{self.path}: is not a database that backlight wrote")
        if meta.get("kind") != DATABASE_KIND:
            raise RunFormatError(f"{self.path}: has kind {meta.get('kind')!r}, expected {DATABASE_KIND!r}")
        check_format(self.path, int(meta["format"]) if str(meta.get("format")).isdecimal() else None)
        wrong = [name for name, statement in TABLES.items() if tables.get(name) != statement]
        if wrong:
            raise RunFormatError(f"{self.path}: its tables {', '.join(wrong)} are not those of the format")

    def _check_files(self) -> None:
        """Refuse a file that is not regular or of another owner, the log and its shared memory included."""
        try:
            owners = untrusted_files.owners_beside(self.path)
            untrusted_files.check(self.path, MAX_DATABASE_BYTES, owners=owners)
            for suffix in SIDE_FILES:
                with contextlib.suppress(FileNotFoundError):
                    untrusted_files.check(sibling(self.path, suffix), MAX_DATABASE_BYTES, owners=owners)
        except FileNotFoundError:
            raise RunFormatError(f"{self.path}: is missing") from None
        except OSError as error:
            raise RunFormatError(f"{error.filename}: cannot be read: {error.strerror}") from error

    def rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> Rows:
        """Return all rows of one query; raises as :meth:`read`."""
        return self.read(lambda connection: connection.query(sql, parameters))

    def read(self, read: Callable[[Connection], T]) -> T:
        """Call ``read`` with a short connection, which all its queries share."""
        problem: Exception | None = None
        for i in range(_TRIES):
            try:
                with self._connection() as connection:
                    return read(connection)
            except sqlite3.OperationalError as error:
                problem = error
                if not self.live:
                    break
                # The writer may just have closed; if it stays locked, a copy can still be made.
                time.sleep(0.002 * i)
                if i > _TRIES // 2 and not self._is_own:
                    self.live = False
            except (sqlite3.DatabaseError, OSError, OverflowError, UnicodeDecodeError) as error:
                problem = error
                break
        raise RunFormatError(f"{self.path}: cannot be read: {problem}") from problem

    def salvage(self, select: str) -> Rows:
        """Return the rows of a table by id, the first column that ``select`` names.

        Of a damaged table: those before its first and behind its last damaged page.
        """
        with contextlib.suppress(RunFormatError):
            return self.rows(f"{select} ORDER BY id")
        by_id: dict[object, tuple[Any, ...]] = {}
        for order in ("ASC", "DESC"):
            with contextlib.suppress(RunFormatError):
                rows = self.read(methodcaller("readable", f"{select} ORDER BY id {order}"))
                by_id |= {row[0]: row for row in rows}
        return [by_id[i] for i in sorted(i for i in by_id if isinstance(i, int))]

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        with self._lock:
            uri, state = self._target()
            if self._hold and state is not None:
                if self._open is None or self._open[0] != state:
                    self._release()
                    connection = _connect(uri)
                    self._open = state, connection
                    weakref.finalize(self, connection.close)
                yield self._open[1]
                return
        with contextlib.closing(_connect(uri)) as connection:
            yield connection

    def _release(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _target(self) -> tuple[str, object]:
        """Return how to open the file, and its state while nothing changes it; None where it may change."""
        if self._copy is None and processes.has_lost(self.path):
            # SQLite would go on with the descriptors of this process, which may be files of the script now.
            self._copy = self._copied()
        if self._copy is None:
            if self.live and sibling(self.path, "-shm").exists():
                return f"{self._uri}?mode=ro", None
            # Never immutable while there is a log: its rows would be left out without an error.
            if size_of(self._log) == 0:
                stat = self.path.stat()
                state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                return f"{self._uri}?mode=ro&immutable=1", None if self.live else state
            if self._is_own:
                raise sqlite3.OperationalError("the log of this process has no shared memory")
            self._copy = self._copied()
        return f"{self._copy.as_uri()}?mode=ro", "copy"

    def merged(self) -> Path:
        """Return a private copy of the database that holds the rows of its log; no other file is changed.

        A database is never opened for writing where it lies: a journal next to it may name any file of this
        user, which SQLite would then delete.

        Raises
        ------
        RunFormatError
            If the rows cannot be moved.
        """
        copy = self._copied()
        with contextlib.closing(connect(copy.absolute().as_uri(), _BUSY_TIMEOUT_S)) as connection:
            ((busy, _, _),) = connection.query("PRAGMA wal_checkpoint(TRUNCATE)")
            ((mode,),) = connection.query("PRAGMA journal_mode = DELETE")
        if busy or mode != "delete" or size_of(sibling(copy, "-wal")):
            raise RunFormatError(f"{self.path}: the rows in its log cannot be moved into it")
        return copy

    def _copied(self) -> Path:
        """Copy the database with its log so that the two belong together."""
        folder = new_folder()
        weakref.finalize(self, remove, folder, os.getpid())
        target = folder / self.path.name
        for _ in range(_TRIES):
            before = _header(self._log)
            with target.open("wb") as file:
                atomic_files.copy_into(self.path, file)
            with contextlib.suppress(FileNotFoundError), sibling(target, "-wal").open("wb") as file:
                atomic_files.copy_into(self._log, file)
            if before == _header(self._log):
                return target
        raise OSError("it changes faster than it can be copied; try again when its writer has less to do")


def _connect(uri: str) -> Connection:
    connection = connect(uri, _BUSY_TIMEOUT_S)
    try:
        connection.query("PRAGMA query_only = 1")
        connection.query("PRAGMA trusted_schema = 0")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    except BaseException:
        connection.close()
        raise
    return connection


def _described(connection: Connection) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the statements of the tables, and what the file states of itself."""
    tables: dict[str, str] = dict(
        connection.query("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    )
    if "CREATE TABLE meta" not in tables.get("meta", ""):
        return tables, {}
    return tables, dict(connection.query("SELECT key, value FROM meta LIMIT ?", (_MAX_META_ROWS,)))


def _header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_WAL_HEADER_BYTES)
    except FileNotFoundError:
        return b""


def sibling(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite keeps next to a database."""
    return path.with_name(path.name + suffix)


def size_of(path: Path) -> int:
    """Return the bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
