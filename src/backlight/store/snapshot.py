"""Reading a SQLite file that may be live, orphaned by a kill, or on a read-only medium: changing nothing.

Three ways, decided at each read:

- There is no write-ahead log: the file is complete and is opened ``immutable``, which makes no other file.
- Its writer lives on this machine: the file is opened read-only beside it, through the shared memory that
  is already there, for one short query.
- There is a log and no known writer: file and log are copied to a temporary folder and the copy is opened.
  ``immutable`` would silently leave out what is still in the log.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backlight.store.errors import RunFormatError

_WAL_HEADER = 32
_ATTEMPTS = 20


class Snapshot:
    """One database of a run; ``live`` says whether a process on this machine still writes it."""

    def __init__(self, path: Path, *, live: bool) -> None:
        self.path = path
        self.live = live
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    def rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run one query and return all rows.

        Raises
        ------
        RunFormatError
            If the file is not there, is no database, or is damaged.
        """
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                with self._connection() as connection:
                    return connection.execute(sql, parameters).fetchall()
            except sqlite3.OperationalError as error:
                # The writer may have closed, or checkpointed, between the look and the query.
                problem = error
                if not self.live:
                    break
                time.sleep(0.005 * attempt)
            except (sqlite3.DatabaseError, OSError) as error:
                problem = error
                break
        raise RunFormatError(f"{self.path}: cannot be read: {problem}") from problem

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._uri(), uri=True, isolation_level=None, timeout=5.0)
        try:
            connection.execute("PRAGMA query_only = 1")
            yield connection
        finally:
            connection.close()

    def _uri(self) -> str:
        if self._copy is not None:
            return f"{(Path(self._copy.name) / self.path.name).as_uri()}?mode=ro"
        log = _beside(self.path, "-wal")
        if _size(log) == 0:
            return f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
        if self.live and _beside(self.path, "-shm").exists():
            return f"{self.path.absolute().as_uri()}?mode=ro"
        self._copy = _copied(self.path, log)
        return self._uri()


def _copied(path: Path, log: Path) -> tempfile.TemporaryDirectory[str]:
    """Copy a database with its log so that the two belong together.

    The log only grows until it is begun anew with another header. What a checkpoint moves into the
    file meanwhile also stands in the log, so equal headers before and after prove the pair.
    """
    folder = tempfile.TemporaryDirectory(prefix="backlight-read-")
    target = Path(folder.name) / path.name
    for _ in range(_ATTEMPTS):
        before = _header(log)
        shutil.copyfile(path, target)
        if log.exists():
            shutil.copyfile(log, _beside(target, "-wal"))
        if before == _header(log):
            return folder
    msg = f"{path}: changes faster than it can be copied; try again when its writer has less to do"
    raise RunFormatError(msg)


def _header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_WAL_HEADER)
    except FileNotFoundError:
        return b""


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
