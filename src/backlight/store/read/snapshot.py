"""Reading a SQLite file that may be live, orphaned by a kill, or on a read-only medium: changing nothing.

Three ways, decided at each query:

- Its writer lives on this machine: the file is opened read-only beside it, through the shared memory that
  is already there, for one short query.
- Nobody writes it and it has no write-ahead log: it is complete, and opened ``immutable``, which makes no
  other file.
- Nobody is known to write it and there is a log: file and log are copied to a temporary folder and
  the copy is opened. ``immutable`` would silently leave out what is still in the log, and opening it in
  place would create files or move the log.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backlight.store.errors import RunFormatError
from backlight.store.format import migrations
from backlight.store.format.manifest import check_format
from backlight.store.format.schema import FORMAT_VERSION
from backlight.store.write.database import DATABASE_KIND, TABLES

_WAL_HEADER = 32
_TRIES = 12
_SALVAGE_QUERIES = 2000


class Snapshot:
    """One database of a run, to be queried without leaving a trace.

    ``live``: a process on this machine still writes it; ``own``: it is this very process. Its file is
    then never opened but through SQLite: closing any other handle would drop the writer's locks.
    """

    def __init__(self, path: Path, *, live: bool = False, own: bool = False) -> None:
        self.path = path
        self.live = live
        self._own = own
        self._copy: Path | None = None
        self._check()

    def rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run one query and return all rows.

        Raises
        ------
        RunFormatError
            If the file is not there, is no database, or is damaged.
        """
        problem: Exception | None = None
        for i in range(_TRIES):
            try:
                with self._connection() as connection:
                    return connection.execute(sql, parameters).fetchall()
            except sqlite3.OperationalError as error:
                problem = error
                if not self.live:
                    break
                # The writer may just have closed; if it does not let us in at all, a copy still can be made.
                time.sleep(0.002 * i)
                if i > _TRIES // 2 and not self._own:
                    self.live = False
            except (sqlite3.DatabaseError, OSError, OverflowError) as error:
                problem = error
                break
        raise RunFormatError(f"{self.path}: cannot be read: {problem}") from problem

    def salvage(self, select: str, last: int) -> tuple[list[tuple[Any, ...]], int]:
        """Return the readable rows with ids up to ``last``, and how many could not be read.

        ``select`` is a query that ends in a condition, to which a range of ids is added. Damage is
        encircled by halving, so that one bad page costs few queries; what is still too wide after many
        of them is given up.
        """
        try:
            return self.rows(f"{select} AND id <= ? ORDER BY id", (last,)), 0
        except RunFormatError:
            found: list[tuple[Any, ...]] = []
            lost = 0
            ranges = [(1, last)]
            for asked in itertools.count():
                if not ranges:
                    break
                low, high = ranges.pop()
                if asked >= _SALVAGE_QUERIES:
                    lost += high - low + 1
                    continue
                try:
                    found += self.rows(f"{select} AND id BETWEEN ? AND ? ORDER BY id", (low, high))
                except RunFormatError:
                    if low == high:
                        lost += 1
                    else:
                        middle = (low + high) // 2
                        ranges += [(middle + 1, high), (low, middle)]
            return found, lost

    def _check(self) -> None:
        """Refuse what is not ours: a foreign database could make a query of ours run what it likes.

        Raises
        ------
        RunFormatError
            If the file is missing, foreign or too new.
        """
        if not self.path.is_file():
            raise RunFormatError(f"{self.path}: is missing")
        found = dict(self.rows("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        if "meta" not in found or "CREATE TABLE meta" not in found["meta"]:
            raise RunFormatError(f"{self.path}: is not a database that backlight wrote")
        meta = dict(self.rows("SELECT key, value FROM meta WHERE key IN ('kind', 'format')"))
        if meta.get("kind") != DATABASE_KIND:
            raise RunFormatError(f"{self.path}: says kind {meta.get('kind')!r}, expected {DATABASE_KIND!r}")
        version = int(meta["format"]) if str(meta.get("format")).isdecimal() else None
        check_format(self.path, version)
        if version is not None and version < FORMAT_VERSION:
            self._migrate(version)
            found = dict(self.rows("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        wrong = [name for name, statement in TABLES.items() if found.get(name) != statement]
        if wrong:
            raise RunFormatError(f"{self.path}: its tables {', '.join(wrong)} are not those of the format")

    def _migrate(self, version: int) -> None:
        """Bring a private copy to the format of this release.

        Raises
        ------
        RunFormatError
            If the old database is not what its format says.
        """
        if self._copy is None:
            self._copy = self._copied()
        self.live = False
        connection = sqlite3.connect(self._copy, isolation_level=None)
        try:
            migrations.migrate_database(connection, version)
        except sqlite3.Error as error:
            raise RunFormatError(f"{self.path}: format {version} cannot be migrated: {error}") from error
        finally:
            connection.close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._uri(), uri=True, isolation_level=None, timeout=2.0)
        try:
            connection.execute("PRAGMA query_only = 1")
            connection.execute("PRAGMA trusted_schema = 0")
            yield connection
        finally:
            connection.close()

    def _uri(self) -> str:
        if self._copy is not None:
            return f"{self._copy.as_uri()}?mode=ro"
        place = self.path.absolute().as_uri()
        if self.live and beside(self.path, "-shm").exists():
            return f"{place}?mode=ro"
        if size_of(beside(self.path, "-wal")) == 0:
            return f"{place}?mode=ro&immutable=1"
        if self._own:
            raise sqlite3.OperationalError("the log of this process has no shared memory")
        self._copy = self._copied()
        return self._uri()

    def _copied(self) -> Path:
        """Copy the database with its log so that the two belong together.

        The log only grows until it is begun anew, with another header. What a checkpoint moves into the
        file meanwhile also stands in the log, so equal headers before and after prove the pair.

        Raises
        ------
        OSError
            If it changes faster than it can be copied.
        """
        log = beside(self.path, "-wal")
        folder = Path(tempfile.mkdtemp(prefix="backlight-read-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        target = folder / self.path.name
        for _ in range(_TRIES):
            before = _header(log)
            shutil.copyfile(self.path, target)
            with contextlib.suppress(FileNotFoundError):
                beside(target, "-wal").unlink(missing_ok=True)
                shutil.copyfile(log, beside(target, "-wal"))
            if before == _header(log):
                return target
        raise OSError("it changes faster than it can be copied; try again when its writer has less to do")


def _header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_WAL_HEADER)
    except FileNotFoundError:
        return b""


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite keeps beside a database."""
    return path.with_name(path.name + suffix)


def size_of(path: Path) -> int:
    """Return the bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
