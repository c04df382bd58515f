"""No thread of backlight is inside of SQLite while the script forks."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backlight
from backlight.store import connections
from backlight.store.connections import CALLS, Connection, connect

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def fork(child: Callable[[], object]) -> int:
    """Return the process of a child that has exit code 0 if ``child`` returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are other threads
        pid = os.fork()
    if not pid:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def use_sqlite() -> None:
    connection = connect("file::memory:", 1.0)
    connection.query("CREATE TABLE t (a)")
    connection.insert("INSERT INTO t VALUES (?)", [(1,), (2,)])
    assert connection.query("SELECT a FROM t") == [(1,), (2,)]
    connection.close()


class Call:
    """A thread inside of a call of SQLite, which ends when ``go`` is set."""

    def __init__(self) -> None:
        self.go, self.events = threading.Event(), list[str]()
        self._inside = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._inside.wait(60)

    def _wait(self) -> int:
        self._inside.set()
        self.go.wait(60)
        self.events.append("ended")
        return 0

    def _run(self) -> None:
        connection: Connection = connect("file::memory:", 1.0)
        connection.create_function("wait", 0, self._wait)
        connection.query("SELECT wait()")
        connection.close()

    def end(self) -> None:
        self.go.set()
        self._thread.join(60)


@pytest.fixture
def call() -> Iterator[Call]:
    running = Call()
    yield running
    running.end()


@pytest.mark.slow
def test_fork_waits_for_the_call_of_another_thread(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FORK_WAIT_S", 60.0)
    forked, codes = threading.Event(), list[int]()

    def run() -> None:
        pid = fork(use_sqlite)
        call.events.append("forked")
        forked.set()
        codes.append(exit_code(pid))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert not forked.wait(0.5)
    call.end()
    thread.join(60)
    assert call.events == ["ended", "forked"]
    assert codes == [0]
    use_sqlite()  # the lock is free again


@pytest.mark.slow
def test_stuck_call_does_not_stop_a_fork(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FORK_WAIT_S", 0.01)
    assert exit_code(fork(CALLS.__enter__)) == 0
    assert not call.events


@pytest.mark.slow
def test_thread_that_is_inside_of_a_call_may_fork() -> None:
    codes = []
    connection = connect("file::memory:", 1.0)
    connection.create_function("fork", 0, lambda: codes.append(exit_code(fork(CALLS.__enter__))))
    connection.query("SELECT fork()")
    connection.close()
    assert codes == [0]
    thread = threading.Thread(target=use_sqlite, daemon=True)  # for whom the lock is free
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_forks_at_the_same_time_all_end() -> None:
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(exit_code(fork(use_sqlite))), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert codes == [0] * 8


@pytest.mark.slow
def test_fork_waits_for_another_lock_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, inside, go = threading.RLock(), threading.Event(), threading.Event()
    events: list[str] = []

    def hold() -> None:
        with lock:
            inside.set()
            go.wait(60)
            events.append("ended")

    monkeypatch.setattr(CALLS, "_others", [])
    CALLS.include(lock)
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert inside.wait(60)
    timer = threading.Timer(0.2, go.set)
    timer.start()
    pid = fork(lambda: lock.acquire(blocking=False) or os._exit(1))
    events.append("forked")
    assert exit_code(pid) == 0
    assert events == ["ended", "forked"]
    thread.join(60)
    assert lock.acquire(blocking=False)


def test_every_call_of_sqlite_holds_the_lock() -> None:
    calls = re.compile(r"sqlite3\.connect\(|\.(execute|executemany|executescript|cursor|commit|backup)\(")
    found = {
        file.name
        for file in (Path(backlight.__file__).parent / "store").rglob("*.py")
        if calls.search(file.read_text(encoding="utf-8"))
    }
    assert found == {"connections.py"}
