from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight import atomic_files
from backlight.records import ParameterRecord, RunStatus
from backlight.store.errors import RunExistsError, RunFormatError
from backlight.store.format.manifest import read_document, write_document
from backlight.store.read.run import Run, open_run
from backlight.store.write.compact import compact
from backlight.store.write.writer import RunWriter

Record = Callable[..., tuple[ParameterRecord, ...]]
Digest = Callable[[Path], dict[str, str]]

BODY = """
writer = RunWriter.create(path, flush_interval=0.0)
for start in range(0, 60, 10):
    record(writer, 10, start)
    writer.event(start, "mark", {"start": start})
    for step in range(start, start + 4):
        writer.array("gram", step, np.full((150, 150), 1.0) if start == 0 else np.eye(5))
    writer.flush()
(path / "attempt-000" / ".rank-00000-000009.h5.77.tmp").write_bytes(b"half")
(path / ".manifest.json.77.tmp").write_bytes(b"half")
ready()
"""


COLUMNS = (
    "events.parquet",
    "findings.parquet",
    "gradient.parquet",
    "index.json",
    "scalars.parquet",
    "tables.parquet",
)


def content(run: Run) -> dict[str, object]:
    """Return the content of a run without the status of its attempts."""
    return {
        "norm": run.frame("gradient", "norm").values.tolist(),
        "steps": run.series_steps("gradient").tolist(),
        "loss": run.scalar("loss").values.tolist(),
        "events": [(e.step, e.kind, dict(e.payload)) for e in run.events()],
        "arrays": [(int(s), a.tolist()) for s, a in zip(*run.array("gram"), strict=True)],
        "parameters": run.parameters(),
    }


@pytest.mark.slow
def test_compaction_after_a_kill_closes_the_run(tmp_path: Path, killed: Callable[..., Path]) -> None:
    path = killed(tmp_path / "run", BODY)
    before = content(open_run(path))
    result = compact(path)
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    assert names == [
        "attempt-000/arrays/rank-00000-000000-000005.h5",
        *(f"attempt-000/columns-000000/{name}" for name in COLUMNS),
        "attempt-000/rank-00000.json",
        "manifest.json",
    ]
    run = open_run(path)
    assert content(run) == before
    assert len(run.series_steps("gradient")) == 60
    assert run.status is RunStatus.KILLED
    assert run.attempts[0].ended is not None
    assert [loss for loss in run.losses if "was killed" not in loss] == []
    assert result.after < result.before


@pytest.mark.slow
def test_compaction_is_idempotent(tmp_path: Path, killed: Callable[..., Path], digest: Digest) -> None:
    path = killed(tmp_path / "run", BODY)
    compact(path)
    before = digest(path)
    compact(path)
    assert digest(path) == before


class Interrupt(BaseException):
    """A simulated kill that no handler catches."""


def compact_up_to(path: Path, point: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compact until rename or unlink number ``point``; return whether compaction finished before it."""
    left = [point]
    unlink, replace = Path.unlink, Path.replace

    def step() -> None:
        if left[0] == 0:
            raise Interrupt
        left[0] -= 1

    def counted_unlink(self: Path, missing_ok: bool = False) -> None:
        if not atomic_files.is_temporary(self.name):
            step()
        unlink(self, missing_ok=missing_ok)

    def counted_replace(self: Path, target: Path) -> Path:
        step()
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", counted_unlink)
        patch.setattr(Path, "replace", counted_replace)
        try:
            compact(path)
        except Interrupt:
            return False
    return True


@pytest.mark.slow
def test_interrupted_compaction_keeps_all_data(
    tmp_path: Path, killed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = killed(tmp_path / "run", BODY)
    before = content(open_run(original))
    for point in itertools.count():
        path = tmp_path / f"run-{point}"
        shutil.copytree(original, path)
        finished = compact_up_to(path, point, monkeypatch)
        assert content(open_run(path)) == before
        compact(path)
        assert content(open_run(path)) == before
        if finished:
            break
    # At least a dataset, the database it replaces, a piece, the two pieces it replaces, and the manifest.
    assert point >= 5


@pytest.mark.slow
def test_live_run_is_not_compacted(
    tmp_path: Path, start_process: Callable[..., subprocess.Popen[str]], digest: Digest, record: Record
) -> None:
    path = tmp_path / "run"
    start_process(path, "writer = RunWriter.create(path); record(writer, 3); writer.flush(); ready()")
    before = digest(path)
    # A reader of a live run writes to the shared memory file only.
    before.pop("attempt-000/rank-00000.db-shm")
    with pytest.raises(RunExistsError, match=r"rank 0 of attempt 0 \(process \d+ on .*\) is still writing"):
        compact(path)
    assert {k: v for k, v in digest(path).items() if not k.endswith("-shm")} == before


@pytest.mark.slow
def test_writer_on_another_host_prevents_compaction(tmp_path: Path, killed: Callable[..., Path]) -> None:
    path = killed(tmp_path / "run", BODY)
    manifest = read_document(path / "manifest.json")
    manifest["attempts"][0]["progress"]["process"]["host"] = "elsewhere"
    manifest["attempts"][0]["progress"]["updated"] -= 3600
    write_document(path / "manifest.json", manifest)
    with pytest.raises(RunExistsError, match=r"whether .* still writes is not observable from here; compact"):
        compact(path)
    compact(path, force=True)
    assert open_run(path).status is RunStatus.KILLED


def test_running_second_rank_prevents_compaction(tmp_path: Path) -> None:
    writers = [RunWriter.create(tmp_path, rank=r, world_size=2, run_id="x") for r in range(2)]
    writers[0].close()
    with pytest.raises(RunExistsError, match="rank 1 of attempt 0"):
        compact(tmp_path)
    writers[1].close()
    compact(tmp_path)


def test_thinning_keeps_every_nth_step_and_other_tables(tmp_path: Path, record: Record) -> None:
    writer = RunWriter.create(tmp_path / "run")
    table = record(writer, 0)
    identifier = writer.parameter_table(table)
    for step in range(0, 300, 3):
        writer.append("gradient", step, identifier, np.random.rand(4, 3), [[1, 1, 0, 0, 0]] * 4)
        writer.scalar(step, "loss", step)
        writer.event(step, "mark", {})
    writer.close()
    result = compact(tmp_path / "run", every=10)
    run = open_run(tmp_path / "run")
    assert run.series_steps("gradient").tolist() == list(range(0, 300, 30))
    assert (len(run.scalar("loss").steps), len(run.events("mark"))) == (100, 100)
    assert run.losses == ()
    assert result.after < result.before
    with pytest.raises(ValueError, match="every is 0"):
        compact(tmp_path / "run", every=0)


@pytest.mark.slow
def test_damaged_database_is_not_modified(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run", 2000)
    database = tmp_path / "run" / "attempt-000" / "rank-00000.db"
    data = bytearray(database.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40_000] = b"\xff" * 40_000
    database.write_bytes(data)
    before = content_of_damaged(tmp_path / "run")
    result = compact(tmp_path / "run", every=2)
    assert any("stay as they are" in note for note in result.notes)
    assert database.read_bytes() == bytes(data)
    assert content_of_damaged(tmp_path / "run") == before


def content_of_damaged(path: Path) -> tuple[int, bool]:
    run = open_run(path)
    return len(run.frame("gradient", "norm").steps), bool(run.losses)


def test_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="is not a backlight run"):
        compact(tmp_path)


@pytest.mark.slow
def test_every_rank_and_attempt_is_compacted(tmp_path: Path, record: Record) -> None:
    for _ in range(2):
        writers = [RunWriter.create(tmp_path, rank=r, world_size=2, run_id="x") for r in range(2)]
        for writer in writers:
            record(writer, 5)
            writer.array("a", 0, np.zeros(3))
            writer.close(RunStatus.FINISHED)
    compact(tmp_path)
    run = open_run(tmp_path)
    assert (run.losses, run.status, len(run.series_steps("gradient"))) == ((), RunStatus.FINISHED, 10)
    assert [a.ranks for a in run.attempts] == [(0, 1), (0, 1)]


@pytest.mark.slow
def test_log_of_a_killed_watchdog_is_merged(tmp_path: Path, killed: Callable[..., Path]) -> None:
    body = """
from backlight.store.write.watchdog import WatchdogWriter
writer = RunWriter.create(path)
watchdog = WatchdogWriter(path, path / "attempt-000")
watchdog.event(3, "stall", {"verdict": "BLOCKED"})
ready()
"""
    path = killed(tmp_path / "run", body)
    assert [p for p in (path / "attempt-000").glob("watchdog-*-wal") if p.stat().st_size]
    compact(path)
    assert not list((path / "attempt-000").glob("*-wal"))
    assert [(e.step, e.kind) for e in open_run(path).events("stall")] == [(3, "stall")]


@pytest.mark.slow
def test_running_watchdog_is_not_touched(
    tmp_path: Path, start_process: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backlight.store.write.database.BUSY_TIMEOUT_S", 0.05)
    RunWriter.create(tmp_path / "run").close()
    body = """
from backlight.store.write.watchdog import WatchdogWriter
watchdog = WatchdogWriter(path, path / "attempt-000")
watchdog.event(3, "stall", {})
ready()
"""
    start_process(tmp_path / "run", body)
    assert any("is in use" in note for note in compact(tmp_path / "run").notes)
    assert len(open_run(tmp_path / "run").events("stall")) == 1
