from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight import codec
from backlight.records import Fingerprint, RunStatus
from backlight.store.errors import RunExistsError, RunFormatError, RunHeldError, RunWriteError
from backlight.store.filesystem import ProcessIdentity
from backlight.store.format.manifest import read_document, write_document
from backlight.store.read.run import open_run
from backlight.store.write import attempt
from backlight.store.write.writer import RunWriter

Digest = Callable[[Path], dict[str, str]]


def test_empty_directory_is_used(tmp_path: Path) -> None:
    RunWriter.create(tmp_path).close()
    assert open_run(tmp_path).status is RunStatus.FINISHED


@pytest.mark.parametrize("content", ["notes.txt", "attempt-000", ".hidden"])
def test_foreign_directory_is_rejected_unchanged(tmp_path: Path, content: str, digest: Digest) -> None:
    (tmp_path / content).mkdir()
    (tmp_path / content / "mine").write_text("precious")
    before = digest(tmp_path)
    with pytest.raises(RunExistsError, match="is not a backlight run and not empty; choose another --out"):
        RunWriter.create(tmp_path)
    assert digest(tmp_path) == before


def test_file_as_run_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    with pytest.raises(RunExistsError, match="is a file, expected a folder"):
        RunWriter.create(tmp_path / "run")
    with pytest.raises(RunWriteError, match="cannot be written: Not a directory"):
        RunWriter.create(tmp_path / "run" / "below")
    assert (tmp_path / "run").read_text() == "precious"


def test_remains_of_a_kill_before_the_manifest_count_as_empty(tmp_path: Path) -> None:
    (tmp_path / "attempt-000").mkdir()
    (tmp_path / ".manifest.json.123.tmp").write_text("half")
    RunWriter.create(tmp_path).close()
    assert open_run(tmp_path).attempts[0].index == 0


def test_finished_run_gets_an_attempt_that_continues_its_steps(
    tmp_path: Path, record: Callable[..., object], digest: Digest
) -> None:
    first = RunWriter.create(tmp_path / "run", name="first", monitors=("health",), groups={"a": "x*"})
    record(first, 10)
    first.close()
    kept = digest(tmp_path / "run" / "attempt-000")
    second = RunWriter.create(
        tmp_path / "run", name="ignored", monitors=("steptime",), groups={"b": "y*"}, resume=True
    )
    assert (second.attempt, second.step_offset) == (1, 10)
    record(second, 5)
    second.close()
    run = open_run(tmp_path / "run")
    assert (run.name, run.monitors, dict(run.groups)) == (
        "first",
        ("health", "steptime"),
        {"a": "x*", "b": "y*"},
    )
    assert run.frame("gradient", "norm").steps.tolist() == list(range(15))
    assert run.scalar("loss").steps.tolist() == list(range(15))
    assert run.scalar("loss", attempt=1).steps.tolist() == list(range(10, 15))
    assert [a.step_offset for a in run.attempts] == [0, 10]
    assert digest(tmp_path / "run" / "attempt-000") == kept


def test_later_attempt_takes_precedence_for_shared_steps(
    tmp_path: Path, record: Callable[..., object], numbers: Callable[..., np.ndarray]
) -> None:
    first = RunWriter.create(tmp_path / "run")
    record(first, 10)
    first.event(3, "mark", {})
    first.close()
    second = RunWriter.create(tmp_path / "run", step_offset=6, resume=True)
    record(second, 3)
    second.event(1, "mark", {})
    second.close()
    run = open_run(tmp_path / "run")
    frame = run.frame("gradient", "norm")
    assert frame.steps.tolist() == list(range(10))
    steps = [0, 1, 2, 3, 4, 5, 0, 1, 2, 9]
    assert np.array_equal(frame.values, [numbers(s)[:, 0] for s in steps])
    assert run.scalar("loss").values.tolist() == [1 / (s + 1) for s in steps]
    assert [(e.step, e.attempt) for e in run.events("mark")] == [(3, 0), (7, 1)]


def test_live_run_is_rejected(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    with pytest.raises(
        RunExistsError, match=r"is still being written by this process \(attempt 0\); stop the watch"
    ):
        RunWriter.create(tmp_path / "run")
    writer.close()
    RunWriter.create(tmp_path / "run", resume=True).close()


def test_run_is_continued_only_on_request(tmp_path: Path, digest: Digest) -> None:
    RunWriter.create(tmp_path / "run", script="a/train.py").close()
    before = digest(tmp_path)
    with pytest.raises(RunHeldError, match=r"holds a run of train\.py already \(finished\); choose another"):
        RunWriter.create(tmp_path / "run", script="train.py")
    with pytest.raises(RunExistsError, match=r"\(of train\.py, this script is other\.py\); choose another"):
        RunWriter.create(tmp_path / "run", script="other.py", resume=True)
    assert digest(tmp_path) == before
    writer = RunWriter.create(tmp_path / "run", script="b/train.py", resume=True)
    assert writer.attempt == 1
    writer.close()


@pytest.mark.parametrize(
    ("launches", "world_size", "continues"),
    [
        (("7+0", "7+1"), 1, True),  # requeued by Slurm
        (("7+0", "7+0"), 1, False),  # two commands of one job
        (("7+0", "7+0"), 2, True),  # torchrun with other members
        (("7+0", "8+0"), 2, False),
    ],
)
def test_only_a_restart_of_its_job_continues_a_run(
    tmp_path: Path, launches: tuple[str, str], world_size: int, continues: bool
) -> None:
    first, second = launches
    RunWriter.create(tmp_path / "run", launch=first, run_id="a", world_size=world_size).close()
    refused = (
        contextlib.nullcontext() if continues else pytest.raises(RunHeldError, match="holds a run already")
    )
    with refused:
        RunWriter.create(tmp_path / "run", launch=second, run_id="b", world_size=world_size).close()
    assert len(open_run(tmp_path / "run").attempts) == 1 + continues


def test_model_of_a_resumed_run_is_expected_to_be_the_same(tmp_path: Path) -> None:
    path, print_ = tmp_path / "run", Fingerprint(module_hash="a", parameter_count=12)
    with RunWriter.create(path, launch="7+0") as first:
        assert first.expected_fingerprint is None
        first.fingerprint(print_)
    with RunWriter.create(path, launch="7+1") as restarted:
        assert restarted.expected_fingerprint is None
        restarted.fingerprint(print_)
    with RunWriter.create(path, resume=True) as resumed:
        assert resumed.expected_fingerprint == print_


@pytest.mark.slow
def test_discarded_attempt_leaves_the_run_as_it_was(
    tmp_path: Path, record: Callable[..., object], digest: Digest
) -> None:
    path = tmp_path / "runs" / "run"
    with pytest.raises(ArithmeticError), RunWriter.create(path) as writer:
        record(writer, 5)
        writer.flush()
        raise ArithmeticError
    assert list(tmp_path.iterdir()) == []
    record(path, 5)
    before = digest(tmp_path)
    writer = RunWriter.create(path, resume=True)
    record(writer, 5)
    writer.evidence("stacks.txt", "text")
    writer.discard()
    writer.close()
    assert digest(tmp_path) == before
    closed = RunWriter.create(tmp_path / "closed")
    closed.close()
    closed.discard()
    assert open_run(tmp_path / "closed").status is RunStatus.FINISHED


@pytest.mark.slow
def test_of_processes_that_start_at_once_each_gets_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "train"
    path.mkdir(parents=True)  # another process has just created it
    barrier, found = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        found.append(RunWriter.create(path, numbered=True))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in found:
        writer.close()
    assert sorted(writer.path.name for writer in found) == [f"train-{n}" for n in range(2, 10)]
    assert list(path.iterdir()) == []


@pytest.mark.slow
def test_killed_run_gets_an_attempt_after_its_last_step(
    tmp_path: Path, killed: Callable[..., Path], record: Callable[..., object]
) -> None:
    body = (
        "writer = RunWriter.create(path); record(writer, 20); writer.flush(); record(writer, 5, 20); ready()"
    )
    path = killed(tmp_path / "run", body)
    writer = RunWriter.create(path, resume=True)
    assert (writer.attempt, writer.step_offset) == (1, 20)
    record(writer, 2)
    writer.close()
    run = open_run(path)
    assert [a.status for a in run.attempts] == [RunStatus.KILLED, RunStatus.FINISHED]
    assert run.frame("gradient", "norm").steps.tolist() == list(range(22))


@pytest.mark.slow
def test_remote_writer_counts_as_alive_while_its_heartbeat_is_fresh(
    tmp_path: Path, killed: Callable[..., Path]
) -> None:
    path = killed(tmp_path / "run", "RunWriter.create(path); ready()")
    manifest = read_document(path / "manifest.json")
    progress = manifest["attempts"][0]["progress"]
    progress["process"]["host"] = "elsewhere"
    write_document(path / "manifest.json", manifest)
    assert open_run(path).status is RunStatus.RUNNING
    with pytest.raises(RunExistsError, match="on elsewhere"):
        RunWriter.create(path)
    progress["updated"] -= 3600
    write_document(path / "manifest.json", manifest)
    run = open_run(path)
    assert run.status is RunStatus.UNKNOWN
    assert any("on elsewhere still runs" in loss for loss in run.losses)
    RunWriter.create(path, resume=True).close()


def test_other_ranks_join_by_the_run_id(tmp_path: Path, record: Callable[..., object]) -> None:
    path, found = tmp_path / "run", []

    def join(rank: int) -> None:
        found.append(RunWriter.create(path, rank=rank, world_size=3, run_id="launch-1"))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    found.append(RunWriter.create(path, rank=0, world_size=3, run_id="launch-1"))
    for thread in threads:
        thread.join()
    for writer in found:
        record(writer, 4)
        writer.scalar(0, "rank", writer.rank, source="user")
        writer.flush()
    running = open_run(path)
    assert (running.run_id, running.losses, running.attempts[0].ranks) == ("launch-1", (), (0, 1, 2))
    for writer in found:
        writer.close()
    run = open_run(path)
    assert (run.losses, run.status) == ((), RunStatus.FINISHED)
    assert [run.scalar("rank", "user", rank=r).values[0] for r in range(3)] == [0, 1, 2]
    assert run.scalar("rank", "user").values.tolist() == [0]


def test_restarted_launch_does_not_join_its_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    both = [RunWriter.create(path, rank=r, world_size=2, run_id="launch") for r in range(2)]
    monkeypatch.setattr(attempt, "JOIN_TIMEOUT_S", 0.1)
    with pytest.raises(RunExistsError, match="rank 1 found no running attempt of launch 'launch'"):
        attempt.enter_further(path, rank=1, launch="launch", timeout_s=0.1)
    for writer in both:
        writer.close()
    again = [RunWriter.create(path, rank=r, world_size=2, run_id="launch") for r in range(2)]
    assert [w.attempt for w in again] == [1, 1]
    for writer in again:
        writer.close()


def test_other_ranks_need_the_run_id_and_rank_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 1 joins the run of rank 0 and needs its run_id"):
        RunWriter.create(tmp_path / "run", rank=1, world_size=2)
    with pytest.raises(RunExistsError, match=r"within 0\.05 s; rank 0 opens it"):
        attempt.enter_further(tmp_path / "run", rank=1, launch="x", timeout_s=0.05)


def test_rank_without_files_is_reported_missing(tmp_path: Path, record: Callable[..., object]) -> None:
    writer = RunWriter.create(tmp_path / "run", world_size=3, run_id="launch")
    record(writer, 2)
    writer.close()
    assert open_run(tmp_path / "run").losses == (
        "attempt 0: rank 1 of 3 left no file",
        "attempt 0: rank 2 of 3 left no file",
    )


@pytest.mark.parametrize("fails", ["RankDatabase", "ArrayWriter"])
def test_failed_open_leaves_no_partial_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, digest: Digest, record: Callable[..., object]
) -> None:
    old = tmp_path / "old"
    record(old, 2)
    (tmp_path / "empty").mkdir()
    before = digest(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"backlight.store.write.writer.{fails}", full)
    for path in (tmp_path / "new" / "deep", tmp_path / "empty", old):
        with pytest.raises(RunWriteError, match="No space left on device; choose another --out"):
            RunWriter.create(path, resume=True)
        assert digest(tmp_path) == before


def test_run_of_a_newer_format_is_rejected(tmp_path: Path, digest: Digest) -> None:
    RunWriter.create(tmp_path / "run").close()
    manifest = read_document(tmp_path / "run" / "manifest.json")
    write_document(tmp_path / "run" / "manifest.json", manifest | {"format": 99})
    before = digest(tmp_path)
    with pytest.raises(RunFormatError, match=r"format 99, .* format 5\. Upgrade"):
        RunWriter.create(tmp_path / "run")
    assert digest(tmp_path) == before


def test_directory_being_opened_by_another_process_is_awaited(tmp_path: Path) -> None:
    with (
        attempt.locked(tmp_path),
        pytest.raises(RunWriteError, match="just opening or compacting"),
        attempt.locked(tmp_path, timeout_s=0.05),
    ):
        pytest.fail("two processes held the lock")
    with attempt.locked(tmp_path, timeout_s=0.05):
        assert list(tmp_path.iterdir()) == []


def test_manifest_holds_the_identity_of_the_writer(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    manifest = read_document(tmp_path / "run" / "manifest.json")
    identity = codec.convert(manifest["attempts"][0]["progress"]["process"], ProcessIdentity)
    assert identity == ProcessIdentity.of_this_process()
    writer.close()
