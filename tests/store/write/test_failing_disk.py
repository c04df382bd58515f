"""Disk failures during training: no exception, one message, and a recorded loss."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.records import Fingerprint, ParameterRecord, RunStatus
from backlight.store.errors import RunWriteError
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
from processes import run_captured

Record = Callable[..., tuple[ParameterRecord, ...]]


def continue_writing(writer: RunWriter, record: Record, start: int) -> None:
    """Call every method that a watch calls; none may raise."""
    record(writer, 3, start=start)
    writer.event(start, "mark", {})
    writer.fingerprint(Fingerprint(script="late"))
    writer.array("x", start, np.zeros(3))
    writer.evidence("dump.txt", "text")
    writer.flush()
    record(writer, 3, start=start + 3)
    writer.flush()


@pytest.mark.slow
def test_full_disk_is_a_reported_loss(mounted: Callable[..., Path], record: Record) -> None:
    target = mounted("size=2m")
    messages: list[str] = []
    writer = RunWriter.create(target / "run", flush_interval=0.0, on_lost=messages.append)
    stored = 0
    for start in range(0, 100_000, 500):
        record(writer, 500, start=start)
        writer.flush()
        if writer.lost:
            break
        stored = start + 500
    assert writer.lost is not None
    assert messages == [writer.lost]
    assert "full" in writer.lost or "No space left" in writer.lost
    continue_writing(writer, record, 100_000)
    writer.close()
    assert len(messages) == 1
    run = open_run(target / "run")
    assert run.status is RunStatus.FINISHED
    assert any("recording stopped after step" in loss and "full" in loss for loss in run.losses)
    assert 0 < stored == len(run.series_steps("gradient"))
    assert np.array_equal(run.scalar("loss").values, 1.0 / np.arange(1, stored + 1))


@pytest.mark.slow
def test_loss_is_written_once_space_is_available(mounted: Callable[..., Path], record: Record) -> None:
    target = mounted("size=2m")
    (target / "ballast").write_bytes(b"x" * 1_500_000)
    writer = RunWriter.create(target / "run", flush_interval=0.0)
    start = 0
    while writer.lost is None:
        record(writer, 200, start=start)
        writer.flush()
        start += 200
    (target / "ballast").unlink()
    writer.close(RunStatus.FINISHED)
    run = open_run(target / "run")
    assert run.status is RunStatus.FINISHED
    assert any("recording stopped after step" in loss and "full" in loss for loss in run.losses)


@pytest.mark.slow
def test_read_only_directory_is_rejected_before_training(
    read_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    target = read_only(tmp_path / "run")
    for path in (target, target / "new"):
        with pytest.raises(
            RunWriteError, match="cannot be written: Read-only file system; choose another --out"
        ):
            RunWriter.create(path)


@pytest.mark.parametrize("what", ["folder", "moved", "database", "replaced"])
def test_deleted_files_are_a_reported_loss(tmp_path: Path, record: Record, what: str) -> None:
    messages: list[str] = []
    path = tmp_path / "run"
    writer = RunWriter.create(path, on_lost=messages.append)
    record(writer, 10)
    writer.flush()
    database = path / "attempt-000" / "rank-00000.db"
    if what == "folder":
        shutil.rmtree(path)
    elif what == "moved":
        path.rename(tmp_path / "elsewhere")
    else:
        database.unlink()
        if what == "replaced":
            database.write_bytes(b"something else")
    continue_writing(writer, record, 10)
    writer.close()
    assert messages == [writer.lost]
    assert "was deleted or moved away while it was written" in messages[0]
    if what == "moved":
        run = open_run(tmp_path / "elsewhere")
        assert len(run.series_steps("gradient")) == 10
    elif what in {"database", "replaced"}:
        manifest = json.loads((path / "manifest.json").read_text())
        assert "was deleted" in manifest["attempts"][0]["progress"]["lost"]


@pytest.mark.slow
def test_file_size_limit_is_a_reported_loss(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
import numpy as np
from backlight.records import ParameterRecord
from backlight.store.write.writer import RunWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
messages = []
writer = RunWriter.create(sys.argv[1], on_lost=messages.append)
table = writer.parameter_table((ParameterRecord("w", (1,), "float32", "cpu", 1),))
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
for step in range(20_000):
    writer.append("gradient", step, table, np.random.rand(1, 3), [[1, 1, 0, 0, 0]])
    if step % 100 == 0:
        writer.flush()
writer.close()
assert len(messages) == 1 and messages[0] == writer.lost, messages
print(messages[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert "disk I/O error" in done.stdout or "full" in done.stdout
    run = open_run(tmp_path / "run")
    assert any("recording stopped" in loss for loss in run.losses)
    assert 0 < len(run.series_steps("gradient")) < 20_000


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database or disk is full"),
        sqlite3.OperationalError("attempt to write a readonly database"),
        OSError(30, "Read-only file system"),
    ],
)
def test_every_disk_error_is_a_loss_and_no_exception(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    messages: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=messages.append)
    record(writer, 3)
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(type(writer._db), "write", fail)
        record(writer, 3, start=3)
        writer.flush()
    continue_writing(writer, record, 6)
    writer.close(RunStatus.FAILED)
    assert len(messages) == 1
    assert str(error) in messages[0]
    run = open_run(tmp_path / "run")
    assert run.series_steps("gradient").tolist() == [0, 1, 2]
    assert run.status is RunStatus.FAILED
    (loss,) = run.losses
    assert loss.startswith("attempt 0, rank 0: recording stopped after step 2: ")


def test_failing_callback_is_ignored(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("the callback is broken")

    writer = RunWriter.create(tmp_path / "run", on_lost=fail)
    shutil.rmtree(tmp_path / "run")
    writer.flush()
    assert writer.lost is not None
    writer.close()


def test_arrays_and_evidence_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    writer = RunWriter.create(tmp_path / "run", on_lost=messages.append)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert writer.evidence("dump.txt", b"x") == ""
    assert len(messages) == 1
    assert "No space left" in messages[0]
    writer.close()


def test_other_ranks_record_their_own_loss(tmp_path: Path, record: Record) -> None:
    writers = [RunWriter.create(tmp_path, rank=r, world_size=2, run_id="x") for r in range(2)]
    record(writers[1], 3)
    writers[1].flush()
    (tmp_path / "attempt-000" / "rank-00001.db").unlink()
    writers[1].flush()
    for writer in writers:
        writer.close()
    losses = open_run(tmp_path).losses
    assert any("attempt 0, rank 1: recording stopped after step 2" in loss for loss in losses)
    assert any("rank-00001.db is missing: lost are" in loss for loss in losses)


CLOSE_ALL = """
import os, sys
from pathlib import Path
import numpy as np
from backlight.records import ParameterRecord
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
folder = Path(sys.argv[1])
messages = []
writer = RunWriter.create(folder / "run", on_lost=messages.append)
table = writer.parameter_table((ParameterRecord("w", (1,), "float32", "cpu", 1),))
def record(step):
    writer.append("gradient", step, table, [[1.0, 1.0, 1.0]], [[1, 1, 0, 0, 0]])
    writer.flush()
for step in range(5):
    record(step)
reading = open_run(folder / "run")  # SQLite keeps descriptors of such readers until the writer closes
reading.frame("gradient", "norm")
os.closerange(3, 256)
files = [(folder / str(i)).open("w+b") for i in range(40)]
for file in files:
    file.write(b"x" * 100_000)
    file.flush()
for step in range(5, 40):
    record(step)
again = open_run(folder / "run")
assert again.series_steps("gradient").tolist() == list(range(5)), again.losses
writer.close()
del reading, again, writer
for file in files:
    file.seek(0)
    assert file.read() == b"x" * 100_000, file.name
    file.close()
assert len(messages) == 1, messages
"""


@pytest.mark.slow
def test_closed_descriptors_are_a_loss_and_harm_no_file_of_the_script(tmp_path: Path) -> None:
    done = run_captured([sys.executable, "-c", CLOSE_ALL, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert all(path.read_bytes() == b"x" * 100_000 for path in tmp_path.iterdir() if path.is_file())
    run = open_run(tmp_path / "run")
    assert run.status is RunStatus.FINISHED
    assert run.series_steps("gradient").tolist() == list(range(5))
    assert any("has closed the descriptors of rank-00000.db" in loss for loss in run.losses)
