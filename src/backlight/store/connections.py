"""Connections of SQLite whose calls keep other threads from forking the process meanwhile.

SQLite takes locks inside of its allocator. A child that is forked while a thread of backlight holds one
would wait for it for ever as soon as the script uses SQLite there: no thread goes on in a child but the
one that forked. The same holds for HDF5 and the lock of h5py, which newer releases of it hold themselves.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from backlight import clock

FORK_WAIT_S = 5.0
"""Seconds that a fork waits for calls to end: a disk that is stuck does not stop the script."""

_POLL_S = 0.0002


class ForkLock:
    """Held by each call; a fork waits until no other thread holds it, and the child begins with a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._others: list[Any] = []
        self._forking = threading.local()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def include(self, lock: Any) -> None:
        """Let forks wait for another reentrant lock as well."""
        if lock not in self._others:
            self._others.append(lock)

    def before_fork(self) -> None:
        """Wait for the calls of other threads."""
        self._forking.locks = acquired = []
        end = clock.monotonic() + FORK_WAIT_S
        for lock in (self._lock, *self._others):
            while not (is_held := lock.acquire(blocking=False)) and clock.monotonic() < end:
                clock.sleep(_POLL_S)
            if is_held:
                acquired.append(lock)

    def after_fork_in_parent(self) -> None:
        """Let calls begin again."""
        for lock in self._forking.locks:
            lock.release()

    def after_fork_in_child(self) -> None:
        """Forget which thread of the parent held it."""
        self.after_fork_in_parent()
        self._lock = threading.RLock()


CALLS = ForkLock()
"""Held by every call of SQLite in this process that is backlight's."""

os.register_at_fork(
    before=CALLS.before_fork,
    after_in_parent=CALLS.after_fork_in_parent,
    after_in_child=CALLS.after_fork_in_child,
)


def connect(location: str, timeout_s: float) -> Connection:
    """Open a database by its URI, without transactions of the module's, for any thread."""
    with CALLS:
        return sqlite3.connect(
            location, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout_s,
            factory=Connection,
        )  # fmt: skip


class Connection(sqlite3.Connection):
    """A connection each of whose calls holds :data:`CALLS`."""

    def query(self, statement: str, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement to its end, and return its rows; a sqlite3.Error passes through.

        A cursor with rows left keeps its statement open, and a checkpoint that is open fails the next COMMIT.
        That it is dropped at once is not certain: ``gc.get_objects`` in another thread keeps every cursor.
        """
        with CALLS:
            return self.execute(statement, tuple(parameters)).fetchall()

    def readable(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement up to the first that cannot be read."""
        rows: list[tuple[Any, ...]] = []
        with CALLS, contextlib.suppress(sqlite3.Error, UnicodeDecodeError, OverflowError):
            rows.extend(self.execute(statement))
        return rows

    def insert(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run a statement for each row; a sqlite3.Error passes through."""
        with CALLS:
            self.executemany(statement, rows)

    def close(self) -> None:
        """Close the connection."""
        with CALLS:
            super().close()
