from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.records import ParameterRecord, RunStatus
from backlight.store.format.manifest import read_document, write_document
from backlight.store.read import snapshot
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

Digest = Callable[[Path], dict[str, str]]
Record = Callable[..., tuple[ParameterRecord, ...]]

KILLED_WITH_A_LOG = """
writer = RunWriter.create(path, flush_interval=0.0)
record(writer, 30)
writer.array("gram", 0, np.eye(3), dims=("a", "b"))
writer.flush()
writer._entry.publish()  # what is due soon, now
record(writer, 7, 30)
ready()
"""


def test_derived_columns_equal_their_formula(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(
        (
            ParameterRecord("a", (4,), "float32", "cpu", 4),
            ParameterRecord("b", (0,), "float32", "cpu", 0),
            ParameterRecord("c", (2,), "float32", "cpu", 2),
        )
    )
    floats = np.array([[6.0, 5.0, 8.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    ints = np.array([[1, 4, 1, 2, 3], [1, 0, 0, 0, 0], [0, 2, 9, 9, 9]])
    writer.append("gradient", 0, table, floats, ints)
    writer.append("update", 0, table, [[3.0, 6.0], [0.0, 0.0], [1.0, 2.0]], [[1, 4, 4], [1, 0, 0], [0, 2, 2]])
    writer.close()
    run = open_run(tmp_path / "run")
    nan = np.nan
    expected = {
        "rms": [3.0, nan, nan],
        "mean": [2.0, nan, nan],
        "non_finite": [5, 0, 0],
        "zero_share": [0.25, nan, nan],
        "zeros": [1, 0, 0],
        "norm": [6.0, 0.0, nan],
    }
    for column, values in expected.items():
        frame = run.frame("gradient", column)
        np.testing.assert_array_equal(frame.values[0], values)
        assert frame.measured.tolist() == [[True, True, False]]
    np.testing.assert_array_equal(run.frame("update", "ratio").values[0], [0.5, nan, nan])
    assert run.frame("gradient", "zeros").values.dtype == np.int64
    assert (run.frame("gradient", "rms").unit, run.frame("update", "ratio").unit) == ("gradient", "1")


def test_unknown_series_and_columns_are_rejected_by_name(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run").close()
    run = open_run(tmp_path / "run")
    with pytest.raises(KeyError, match="no series is called 'x'; there are gradient, update, histogram"):
        run.frame("x", "norm")
    with pytest.raises(KeyError, match="series 'gradient' has no column 'x'; it has norm"):
        run.frame("gradient", "x")
    with pytest.raises(KeyError, match="no array is called 'x'; there are none"):
        run.array_info("x")


def test_run_without_data_is_empty(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run").close()
    run = open_run(tmp_path / "run")
    frame = run.frame("gradient", "norm")
    assert (frame.steps.size, frame.names, frame.values.shape) == (0, (), (0, 0))
    assert (run.has("gradient"), run.series_steps("gradient").size, run.last_step()) == (False, 0, -1)
    assert (run.scalar("loss").steps.size, run.events(), run.parameters()) == (0, (), ())
    assert (run.array_names(), run.evidence(), run.losses) == ((), (), ())


def test_changing_parameters_share_one_axis_in_model_order(tmp_path: Path, record: Record) -> None:
    writer = RunWriter.create(tmp_path / "run")
    record(writer, 2, names=["a", "c", "d"])
    record(writer, 2, start=2, names=["a", "b", "c"])
    record(writer, 2, start=4, names=["d", "a"])
    writer.close()
    run = open_run(tmp_path / "run")
    frame = run.frame("gradient", "norm")
    assert frame.names == ("a", "b", "c", "d") == tuple(p.name for p in run.parameters())
    yes, no = True, False
    assert frame.measured[::2].tolist() == [[yes, no, yes, yes], [yes, yes, yes, no], [yes, no, no, yes]]
    assert np.isnan(frame.values[~frame.measured]).all()
    assert frame.values[4, 3] < frame.values[4, 0]


def test_frames_are_shared_and_read_only(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run", 2)
    run = open_run(tmp_path / "run")
    frame = run.frame("gradient", "norm")
    assert run.frame("gradient", "norm") is frame
    with pytest.raises(ValueError, match="read-only"):
        frame.values[0, 0] = 1.0


def test_open_run_is_a_snapshot(tmp_path: Path, record: Record) -> None:
    writer = RunWriter.create(tmp_path / "run")
    record(writer, 5)
    writer.flush()
    before = open_run(tmp_path / "run")
    record(writer, 5, start=5)
    writer.flush()
    assert (len(before.series_steps("gradient")), len(before.scalar("loss").steps)) == (5, 5)
    assert len(open_run(tmp_path / "run").series_steps("gradient")) == 10
    writer.close()
    assert len(before.series_steps("gradient")) == 5


@pytest.mark.slow
def test_killed_run_is_read_completely_without_changes(
    tmp_path: Path, killed: Callable[..., Path], digest: Digest
) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    before = digest(path)
    assert any(name.endswith("-wal") for name in before)
    run = open_run(path)
    assert run.status is RunStatus.KILLED
    assert run.frame("gradient", "norm").steps.tolist() == list(range(30))
    assert len(run.scalar("loss").steps) == 30
    assert run.array("gram")[1][0].tolist() == np.eye(3).tolist()
    assert run.losses == (
        "attempt 0, rank 0: its process was killed;"
        " up to one flush interval (0 s) of what it recorded last is lost",
    )
    assert digest(path) == before


@pytest.mark.slow
def test_copy_without_the_log_reports_missing_rows(tmp_path: Path, killed: Callable[..., Path]) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    run = open_run(copy)
    assert any(
        "holds only" in loss and "0 of 30 rows of series_gradient" in loss and "without its -wal" in loss
        for loss in run.losses
    )


@pytest.mark.slow
def test_copy_with_the_log_is_complete(tmp_path: Path, killed: Callable[..., Path]) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*-shm"))
    assert len(open_run(copy).series_steps("gradient")) == 30


@pytest.mark.slow
def test_private_copies_are_removed_with_the_run(
    tmp_path: Path, killed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    run = open_run(path)
    (folder,) = private.iterdir()
    assert len(list(folder.iterdir())) == 1
    del run
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_private_copies_of_killed_readers_are_removed(
    tmp_path: Path, killed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    private = tmp_path / "private"
    private.mkdir()
    code = "import sys, backlight; run = backlight.open_run(sys.argv[1]); print(flush=True); sys.stdin.read()"
    reading = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], env={**os.environ, "TMPDIR": str(private)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in reading:
        assert process.stdout is not None
        process.stdout.readline()
    folders = set(private.iterdir())
    assert len(folders) == 2
    reading[0].kill()
    reading[0].wait()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    assert len(open_run(path).series_steps("gradient")) == 30
    (kept,) = folders & set(private.iterdir())  # that of the process which still reads
    assert any(kept.iterdir())
    for process in reading:
        process.communicate()
    assert not kept.exists()


@pytest.mark.slow
def test_fork_leaves_the_private_copy_of_its_parent(tmp_path: Path, killed: Callable[..., Path]) -> None:
    run = open_run(killed(tmp_path / "run", KILLED_WITH_A_LOG))
    child = os.fork()
    if not child:
        try:
            del run
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(run.series_steps("gradient")) == 30


@pytest.mark.slow
def test_run_is_readable_during_writing(
    tmp_path: Path, start_process: Callable[..., subprocess.Popen[str]]
) -> None:
    path = tmp_path / "run"
    body = """
writer = RunWriter.create(path, flush_interval=0.0)
table = writer.parameter_table(TABLE)
print("ready", flush=True)
for step in range(10**9):
    writer.append("gradient", step, table, floats_at(step), INTS)
    writer.scalar(step, "loss", 1.0 / (step + 1))
    if step % 50 == 0:
        writer.array("gram", step, floats_at(step))
    if step % 7 == 0:
        writer.flush()
"""
    process = start_process(path, body)
    counts, until = [], time.monotonic() + 1.5
    while time.monotonic() < until:
        run = open_run(path)
        frame = run.frame("gradient", "norm")
        if not frame.names:
            continue
        assert np.array_equal(frame.steps, np.arange(len(frame.steps)))
        scale = np.sqrt(frame.steps + 2.0)[:, None] * np.array([1.0, 4.0, 7.0, 10.0])
        assert np.array_equal(frame.values, scale)
        assert len(run.scalar("loss").steps) == len(frame.steps)
        steps, arrays = run.array("gram") if "gram" in run.array_names() else ((), ())
        assert all(a[0, 0] == np.sqrt(s + 2.0) for s, a in zip(steps, arrays, strict=True))
        assert (run.status, run.losses) == (RunStatus.RUNNING, ())
        counts.append(len(frame.steps))
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    names = {p.name for p in (path / "attempt-000").iterdir() if not p.name.startswith(".")}
    assert names <= {"rank-00000.db", "rank-00000.db-wal", "rank-00000.db-shm", "rank-00000.json", "arrays"}
    process.kill()
    process.wait()
    assert len(open_run(path).series_steps("gradient")) >= counts[-1]


def test_readers_do_not_block_closing(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path)
    record(writer, 5)
    writer.flush()
    run = open_run(path)
    run.frame("gradient", "norm")
    writer.close()
    assert not list(path.rglob("*-wal"))
    assert run.frame("gradient", "max_abs").values.shape == (5, 4)


@pytest.mark.slow
def test_log_that_changes_during_the_copy_is_copied_again(
    tmp_path: Path, killed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    real, calls = snapshot._header, []

    def moving(log: Path) -> bytes:
        calls.append(log)
        return real(log) + (b"" if len(calls) > 3 else bytes([len(calls)]))

    monkeypatch.setattr(snapshot, "_header", moving)
    assert len(open_run(path).series_steps("gradient")) == 30
    assert len(calls) == 6


@pytest.mark.slow
def test_read_only_directory_is_readable(
    tmp_path: Path, killed: Callable[..., Path], digest: Digest, read_only: Callable[[Path], Path]
) -> None:
    path = killed(tmp_path / "run", KILLED_WITH_A_LOG)
    target = read_only(path)
    before = digest(target)
    run = open_run(target)
    assert len(run.series_steps("gradient")) == 30
    assert run.status is RunStatus.KILLED
    assert run.array("gram")[0].tolist() == [0]
    assert digest(target) == before


@pytest.mark.slow
def test_reading_imports_neither_torch_nor_h5py(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run", 2)
    code = """
import sys
import tempfile
sys.modules["torch"] = None
from backlight.store.read.run import open_run
run = open_run(sys.argv[1])
assert run.frame("gradient", "rms").values.shape == (2, 4)
assert "h5py" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)


@pytest.mark.slow
def test_missing_directory_or_file_is_reported(tmp_path: Path, record: Record) -> None:
    for _ in range(2):
        writer = RunWriter.create(tmp_path / "run", resume=True)
        record(writer, 3)
        writer.array("x", 0, np.zeros(2))
        writer.close()
    shutil.rmtree(tmp_path / "run" / "attempt-000")
    (tmp_path / "run" / "attempt-001" / "arrays" / "rank-00000-000000.h5").unlink()
    run = open_run(tmp_path / "run")
    assert run.losses == (
        "attempt 0: its folder attempt-000 is missing",
        "attempt 1, rank 0: attempt-001/arrays/rank-00000-000000.h5 is missing",
    )
    assert run.series_steps("gradient").tolist() == [3, 4, 5]
    (tmp_path / "run" / "attempt-001" / "rank-00000.db").unlink()
    gone = open_run(tmp_path / "run")
    assert any("rank-00000.db is missing: lost are 1 rows of parameter_table" in loss for loss in gone.losses)


def test_manifest_paths_cannot_leave_the_directory(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run", 3)
    manifest = read_document(tmp_path / "run" / "manifest.json")
    files = manifest["attempts"][0]["progress"]["files"]
    files["attempt-000/../../secret.db"] = {"scalar": 10}
    files["/etc/passwd"] = {"bytes": 1}
    files["attempt-000/arrays/../../../rank-00000-000000.h5"] = {"bytes": 1}
    write_document(tmp_path / "run" / "manifest.json", manifest)
    assert open_run(tmp_path / "run").losses == ()
