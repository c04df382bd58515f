"""Runs on (simulated) network storage, where no database may be open."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.records import ParameterRecord, RunStatus
from backlight.store import filesystem
from backlight.store.format.names import parse_database, segment_name
from backlight.store.read.run import open_run
from backlight.store.write import database
from backlight.store.write.compact import compact
from backlight.store.write.writer import RunWriter

Record = Callable[..., tuple[ParameterRecord, ...]]

ON_NETWORK = """
from backlight.store import filesystem
from backlight.store.write import database
filesystem.on_network = lambda path: True
database.FIRST_SEGMENT_S = database.SEGMENT_INTERVAL_S = database.AGE_SHARE = 0.0
writer = RunWriter.create(path, flush_interval=0.0)
for start in (0, 10, 20):
    record(writer, 10, start)
    writer.flush()
database.SEGMENT_INTERVAL_S = 1e9
record(writer, 10, 30)
writer.flush()
writer._entry.publish()  # what is due soon, now
record(writer, 5, 40)
ready()
"""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make every directory network storage; return the directory of the local files."""
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(filesystem, "on_network", lambda _: True)
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    return local


@pytest.fixture
def segment_per_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_SEGMENT_S", "SEGMENT_INTERVAL_S", "AGE_SHARE"):
        monkeypatch.setattr(database, name, 0.0)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the directory of the local files of child processes."""
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setenv("TMPDIR", str(local))
    return local


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_no_open_database_in_the_run_directory(network: Path, tmp_path: Path, record: Record) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path)
    record(writer, 10)
    writer.flush()
    assert names(path / "attempt-000") == ["rank-00000.json"]
    assert len(list(network.rglob("*.db"))) == 1
    running = open_run(path)
    assert (running.status, running.losses, running.series_steps("gradient").size) == (
        RunStatus.RUNNING,
        (),
        0,
    )
    writer.close()
    assert names(path / "attempt-000") == ["rank-00000.000000.db", "rank-00000.json"]
    assert list(network.iterdir()) == []
    run = open_run(path)
    assert (run.series_steps("gradient").tolist(), run.losses) == (list(range(10)), ())


@pytest.mark.slow
@pytest.mark.usefixtures("network", "segment_per_flush")
def test_segments_are_read_as_one_file(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path, flush_interval=0.0)
    for start in range(0, 30, 10):
        table = record(writer, 10, start=start)
        writer.scalar(start, f"only-{start}", 1.0)
        writer.event(start, "mark", {})
        writer.flush()
        assert open_run(path).series_steps("gradient").tolist() == list(range(start + 10))
    writer.close()
    assert names(path / "attempt-000")[:4] == [segment_name(0, i) for i in range(4)]
    run = open_run(path)
    assert run.parameters() == table
    assert run.frame("gradient", "norm").steps.tolist() == list(range(30))
    assert run.scalar("loss").steps.tolist() == list(range(30))
    assert run.scalar_names() == ("loss", "only-0", "only-10", "only-20")
    assert [e.step for e in run.events("mark")] == [0, 10, 20]
    assert (run.attempts[0].ranks, run.losses) == ((0,), ())
    manifest = json.loads((path / "manifest.json").read_text())
    progress = manifest["attempts"][0]["progress"]
    assert progress["files"]["attempt-000/rank-00000.000001.db"]["series_gradient"] == 10
    assert progress["local"] == ""


@pytest.mark.slow
@pytest.mark.usefixtures("network", "segment_per_flush")
def test_compaction_replaces_the_segments(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path)
    for start in range(0, 30, 10):
        record(writer, 10, start=start)
        writer.event(start, "mark", {})
        writer.flush()
    writer.close()
    segment = path / "attempt-000" / segment_name(0, 1)
    shutil.copyfile(segment, tmp_path / "copy.db")
    compact(path)
    assert names(path / "attempt-000") == ["columns-000000", "rank-00000.json"]
    # As if compaction had been killed before it removed the last segment.
    shutil.copyfile(tmp_path / "copy.db", segment)
    run = open_run(path)
    assert run.frame("gradient", "norm").steps.tolist() == list(range(30))
    assert [e.step for e in run.events("mark")] == [0, 10, 20]
    assert run.losses == ()
    compact(path)
    assert not segment.exists()


@pytest.mark.slow
def test_local_rows_are_reported_and_recovered_after_a_kill(
    tmp_path: Path, killed: Callable[..., Path], local: Path
) -> None:
    path = killed(tmp_path / "run", ON_NETWORK)
    run = open_run(path)
    assert run.status is RunStatus.KILLED
    assert run.series_steps("gradient").tolist() == list(range(30))
    assert any(f"in {local}" in loss and "backlight compact" in loss for loss in run.losses)
    result = compact(path)
    assert any("recovered" in note for note in result.notes)
    (folder,) = local.iterdir()  # any run may name any folder: rows are copied, and nothing is removed
    assert (folder / "rank-00000.db").exists()
    run = open_run(path)
    assert run.series_steps("gradient").tolist() == list(range(40))
    assert [loss for loss in run.losses if "was killed" not in loss] == []


@pytest.mark.slow
def test_missing_or_foreign_local_database_stays_reported(
    tmp_path: Path, killed: Callable[..., Path], local: Path, record: Record
) -> None:
    path = killed(tmp_path / "run", ON_NETWORK)
    (folder,) = local.iterdir()
    record(tmp_path / "other", 3)
    for name in names(folder):
        (folder / name).unlink()
    foreign = folder / "rank-00000.db"
    shutil.copyfile(tmp_path / "other" / "attempt-000" / "rank-00000.db", foreign)
    assert any("belongs to another run" in note for note in compact(path).notes)
    assert foreign.exists()
    foreign.unlink()
    assert any("does not exist here" in note for note in compact(path).notes)
    run = open_run(path)
    assert any("backlight compact" in loss for loss in run.losses)
    assert run.series_steps("gradient").tolist() == list(range(30))


def test_deleted_directory_is_reported(network: Path, tmp_path: Path, record: Record) -> None:
    messages: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=messages.append)
    record(writer, 3)
    shutil.rmtree(tmp_path / "run")
    writer.flush()
    writer.flush()
    writer.close()
    assert len(messages) == 1
    assert network.is_dir()


def test_database_names() -> None:
    assert parse_database("rank-00000.db") == (0, -1, -1)
    assert parse_database(segment_name(2, 7)) == (2, 7, 7)
    assert parse_database(segment_name(2, 7, 9)) == (2, 7, 9)
    for name in ("rank-00000.db-wal", "rank-0.db", "watchdog-host.db", ".rank-00000.db.1.tmp"):
        assert parse_database(name) is None
