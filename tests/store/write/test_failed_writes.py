"""A write that fails is tried again: no single one ends a recording, and nothing is lost by it."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight import atomic_files
from backlight.records import Fingerprint, RunStatus
from backlight.report.source import Source
from backlight.report.verdict import describe_cost
from backlight.store import connections, filesystem
from backlight.store.read.run import open_run
from backlight.store.write import database
from backlight.store.write.database import MAX_FAILURES
from backlight.store.write.writer import RunWriter


class KeepingConnection(connections.Connection):
    """Keeps every cursor, as a thread does that holds the list of ``gc.get_objects``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept: list[sqlite3.Cursor] = []

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.kept.append(super().execute(*arguments))
        return self.kept[-1]


def record(writer: RunWriter, step: int) -> None:
    writer.scalar(step, "loss", float(step))
    writer.reach(step)
    writer.flush()


def losses(path: Path) -> list[float]:
    run = open_run(path)
    assert run.losses == ()
    assert run.shortfall == ""
    return run.scalar("loss").values.tolist()


def test_cursors_that_live_on_fail_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "Connection", KeepingConnection)
    monkeypatch.setattr(database, "SYNC_INTERVAL_S", -1.0)  # a checkpoint at each write
    monkeypatch.setattr(database, "MAX_FAILURES", 0)
    writer = RunWriter.create(tmp_path / "run")
    for step in range(5):
        record(writer, step)
    assert writer.lost is None
    writer.close()
    monkeypatch.undo()
    assert not (tmp_path / "run/attempt-000/rank-00000.db-wal").exists(), "the log was moved into the file"
    assert losses(tmp_path / "run") == [0.0, 1.0, 2.0, 3.0, 4.0]


def fail(writer: RunWriter, monkeypatch: pytest.MonkeyPatch, times: int, error: Exception) -> list[int]:
    """Let the next writes of ``writer`` fail, before or after their rows were inserted."""
    write, left = type(writer._db).write, [times]

    def failing(self: Any, batch: Any, sizes: Any) -> None:
        if left[0]:
            left[0] -= 1
            self._connection.execute("BEGIN IMMEDIATE")  # and leaves its transaction open
            raise error
        write(self, batch, sizes)

    monkeypatch.setattr(type(writer._db), "write", failing)
    return left


@pytest.mark.parametrize("times", [1, MAX_FAILURES])
def test_failed_write_is_repeated(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=said.append)
    record(writer, 0)
    fail(writer, monkeypatch, times, sqlite3.OperationalError("cannot commit transaction"))
    for step in range(1, 8):
        record(writer, step)
    writer.close()
    assert said == []
    assert losses(tmp_path / "run") == [float(step) for step in range(8)]


def test_last_write_is_repeated_before_the_run_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "run")
    left = fail(writer, monkeypatch, 2, sqlite3.DatabaseError("disk I/O error"))
    writer.scalar(0, "loss", 1.0)
    writer.close()
    assert left == [0]
    assert losses(tmp_path / "run") == [1.0]


@pytest.mark.parametrize(
    ("error", "tries"), [("database or disk is full", 1), ("disk I/O error", MAX_FAILURES + 1)]
)
def test_disk_that_goes_on_to_fail_ends_the_recording(
    error: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=said.append)
    record(writer, 0)
    left = fail(writer, monkeypatch, 100, sqlite3.OperationalError(error))
    for step in range(1, 20):
        record(writer, step)
    writer.close(RunStatus.FINISHED)
    assert 100 - left[0] == tries
    (reason,) = said
    assert error in reason
    assert open_run(tmp_path / "run").shortfall == "recording stopped at step 0 of 20"


def test_reader_that_is_open_while_a_write_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors are those of the same file: that they are closed later is no loss of the writer's."""
    writer = RunWriter.create(tmp_path / "run")
    record(writer, 0)
    file = tmp_path / "run/attempt-000/rank-00000.db"
    reader = connections.connect(f"{file.as_uri()}?mode=ro", 1.0)
    assert reader.query("SELECT count(*) FROM meta")
    fail(writer, monkeypatch, 1, sqlite3.OperationalError("cannot commit transaction"))
    for step in (1, 2):
        record(writer, step)
    reader.close()
    record(writer, 3)
    writer.close()
    assert writer.lost is None
    assert losses(tmp_path / "run") == [0.0, 1.0, 2.0, 3.0]


def test_writes_of_two_threads_are_repeated_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each third write fails, as one did whose connection had a statement open; a third thread reads."""
    said: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=said.append)
    write, calls, failed = type(writer._db).write, itertools.count(1), itertools.count()
    problem = "cannot commit transaction - SQL statements in progress"

    def failing(self: Any, batch: Any, sizes: Any) -> None:
        if next(calls) % 3 == 0:
            next(failed)
            self._connection.execute("BEGIN IMMEDIATE")
            raise sqlite3.OperationalError(problem)
        write(self, batch, sizes)

    monkeypatch.setattr(type(writer._db), "write", failing)

    def work(number: int) -> None:
        for step in range(60):
            writer.scalar(step, f"loss/{number}", float(step))
            writer.event(step, f"event/{number}", {"step": step})
            writer.flush()

    def look(done: threading.Event) -> None:
        while not done.is_set():
            open_run(tmp_path / "run").events("event/0")
            gc.get_objects()

    done = threading.Event()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    looker = threading.Thread(target=look, args=(done,))
    for thread in (*threads, looker):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    looker.join()
    writer.reach(59)
    writer.close()
    assert (said, writer.lost) == ([], None)
    run = open_run(tmp_path / "run")
    assert (run.losses, run.shortfall) == ((), "")
    for number in range(2):
        assert run.scalar(f"loss/{number}").values.tolist() == [float(step) for step in range(60)]
        assert sorted(event.payload["step"] for event in run.events(f"event/{number}")) == list(range(60))
    counted = run.events("repeated_writes")
    times = next(failed)
    assert times >= 20
    assert sum(event.payload["writes"] for event in counted) == times
    assert all(problem in event.payload["reason"] for event in counted)
    assert f"{times} writes failed and succeeded later (last: OperationalError: {problem})" in describe_cost(
        Source(run, ())
    )


@pytest.mark.parametrize("times", [1, MAX_FAILURES])
@pytest.mark.parametrize("name", ["rank-00000-000000.h5", "manifest.json", "rank-00000.json"])
def test_failed_file_is_written_with_the_next_flush(
    name: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=said.append, flush_interval=0.0)
    left, sync = [times], atomic_files.sync_file

    def failing(path: Path) -> None:
        if path.name.startswith(f".{name}.") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(atomic_files, "sync_file", failing)
    writer.fingerprint(Fingerprint(script="train.py"))
    writer.array("gram", 0, np.arange(3.0))
    for step in range(8):
        record(writer, step)
    writer.close()
    assert (left, said) == ([0], [])
    assert losses(tmp_path / "run") == [float(step) for step in range(8)]
    run = open_run(tmp_path / "run")
    assert run.array("gram")[1][0].tolist() == [0.0, 1.0, 2.0]
    assert run.fingerprint() is not None


def test_evidence_that_cannot_be_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = RunWriter.create(tmp_path / "run")
    monkeypatch.setattr("backlight.store.write.writer.write_evidence", refuse)
    assert writer.evidence("stack.txt", "main") == ""
    record(writer, 0)
    writer.close()
    assert writer.lost is None
    run = open_run(tmp_path / "run")
    (loss,) = run.losses
    assert "'evidence stack.txt': 1" in loss
    assert run.scalar("loss").values.tolist() == [0.0]


def test_segment_that_cannot_be_published_is_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "on_network", lambda _: True)
    monkeypatch.setattr(database, "FIRST_SEGMENT_S", 0.0)
    said: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=said.append)
    left, copy = [1], atomic_files.copy

    def failing(source: Path, target: Path) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        copy(source, target)

    monkeypatch.setattr(atomic_files, "copy", failing)
    for step in range(5):
        record(writer, step)
    writer.close()
    assert (left, said) == ([0], [])
    assert losses(tmp_path / "run") == [float(step) for step in range(5)]
