"""Reader connections: one to a complete file, none kept to a live file, none immutable with a log."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.records import ParameterRecord
from backlight.store.read import snapshot
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter

Record = Callable[..., tuple[ParameterRecord, ...]]
DATABASE = Path("attempt-000") / "rank-00000.db"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the URIs of all connections that readers open."""
    uris: list[str] = []
    connect = snapshot._connect

    def counted(uri: str) -> sqlite3.Connection:
        uris.append(uri)
        return connect(uri)

    monkeypatch.setattr(snapshot, "_connect", counted)
    return uris


@pytest.fixture
def finished(tmp_path: Path, record: Record) -> Path:
    writer = RunWriter.create(tmp_path / "run")
    record(writer, 5)
    writer.event(0, "kind", {"a": 1})
    writer.close()
    return tmp_path / "run"


def read_everything(run: Run) -> None:
    for column in ("norm", "rms", "nan"):
        assert run.frame("gradient", column).measured.shape == (5, 4)
    assert run.scalar("loss").steps.tolist() == list(range(5))
    assert len(run.events("kind")) == 1
    assert run.losses == ()
    assert run.stored_findings() == ()
    assert run.last_step() == 4


def test_finished_run_is_read_through_one_connection(finished: Path, opened: list[str]) -> None:
    read_everything(open_run(finished))
    assert len(opened) == 1
    assert opened[0].endswith("immutable=1")


def test_changed_file_is_reopened(finished: Path, opened: list[str]) -> None:
    run = open_run(finished)
    os.utime(finished / DATABASE, ns=(1, 1))
    read_everything(run)
    assert len(opened) == 2


def test_log_that_appears_later_is_read(finished: Path, opened: list[str]) -> None:
    run = open_run(finished)
    with contextlib.closing(sqlite3.connect(finished / DATABASE, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("INSERT INTO meta VALUES ('another', 'row')")
        read_everything(run)
    assert not opened[-1].endswith("immutable=1")


def test_no_connection_to_a_live_file_is_kept(tmp_path: Path, record: Record, opened: list[str]) -> None:
    writer = RunWriter.create(tmp_path / "run")
    record(writer, 5)
    writer.event(0, "kind", {"a": 1})
    writer.flush()
    run = open_run(tmp_path / "run")
    read_everything(run)
    assert run._files[0]._snapshot._open is None
    assert not any(uri.endswith("immutable=1") for uri in opened)
    writer.close()
