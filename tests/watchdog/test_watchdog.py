"""A watched process and its watchdog: neither can harm the training; `attach` diagnoses as they do."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from answer_schemas import schema_of
from jsonschema import validate

import backlight
from backlight import processes
from backlight.cli.app import main
from backlight.distributed import ProcessNotFoundError
from backlight.monitors.stalls import monitor
from backlight.records import DiagnosisKind
from backlight.store.read.run import open_run
from backlight.watchdog import runtime_dir
from backlight.watchdog.attach import attach
from backlight.watchdog.observer import RankObserver
from backlight.watchdog.shared_state import RankStatus, SharedState, Slot, read_state
from backlight.watchdog.stacks import Frame, StackSample, ThreadStack
from backlight.watchdog.timeouts import StallLimits


def train(steps: int, seconds: float = 0.0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(seconds)
    return [p.detach().clone() for p in model.parameters()]


def watchdog_pid(base: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for found in base.glob("*/watchdog.json"):
            if pid := runtime_dir.watchdog_pid(found.parent):
                return pid
        time.sleep(0.02)
    pytest.fail("no watchdog was started")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while (found := processes.read_process(pid)) is not None and not found.is_dead:
        assert time.monotonic() < deadline, "the watchdog outlives the ranks"
        time.sleep(0.05)


@pytest.mark.slow
def test_state_follows_the_training_and_is_removed(tmp_path: Path, directory: Path) -> None:
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        train(3)
        pid = watchdog_pid(directory)
        (path,) = directory.glob("*/rank-00000.state")
        state = read_state(path)
        assert (state.step, state.backwards, state.forwards) == (3, 3, 3)
        assert (state.reached, state.expected, state.status) == (4, 4, RankStatus.RUNNING)
        assert state.nodes_total > 5
        names = runtime_dir.read_document(path.with_name("rank-00000.names.json"), list)
        assert names[state.row] in {"0.weight", "0.bias"}
        # No child: a script that waits for all its children must not wait for it.
        parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
        assert int(parent) != os.getpid()
    wait_until_gone(pid)
    assert not list(directory.iterdir())
    assert open_run(tmp_path / "run").stored_findings() == ()


@pytest.mark.slow
def test_watching_changes_no_weight(tmp_path: Path, directory: Path) -> None:
    plain = train(6)
    with backlight.watch(run=tmp_path / "run", monitors="stalls", stalls={"after": 0.5}):
        watched = train(6)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.alone
def test_killed_watchdog_is_reported_and_training_continues(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_CHECK_PERIODS", 1)
    traced: list[int] = []
    monkeypatch.setattr(processes, "allow_tracing", traced.append)
    plain = train(30)

    def train_until(is_reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not is_reached():
            assert time.monotonic() < deadline
            train(1, 0.05)

    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        pid = watchdog_pid(directory)
        train_until(lambda: traced)
        assert traced == [pid]
        os.kill(pid, signal.SIGKILL)
        train_until(lambda: open_run(tmp_path / "run").events("unmeasured"))
        watched = train(30)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    (event,) = open_run(tmp_path / "run").events("unmeasured")
    assert "the watchdog process has ended" in event.payload["reason"]
    assert not list(directory.iterdir())


def test_full_shared_memory_is_reported_and_training_continues(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        train(2)
    (event,) = open_run(tmp_path / "run").events("unmeasured")
    assert event.payload["what"] == "stalls"
    assert "No space left" in event.payload["reason"]
    assert not list(directory.iterdir())


@pytest.mark.slow
def test_signal_handler_of_the_user_is_kept(tmp_path: Path, directory: Path) -> None:
    from backlight.watchdog.stacks import DUMP_SIGNAL

    def user_handler(*_args: object) -> None:
        return None

    before = signal.signal(DUMP_SIGNAL, user_handler)
    try:
        with backlight.watch(run=tmp_path / "run", monitors="stalls"):
            train(1)
            assert signal.getsignal(DUMP_SIGNAL) is user_handler
    finally:
        signal.signal(DUMP_SIGNAL, before)
    (event,) = open_run(tmp_path / "run").events("unmeasured")
    assert event.payload["what"] == "stacks by signal"


@pytest.mark.slow
def test_patches_and_hooks_are_removed(tmp_path: Path, directory: Path) -> None:
    apply = torch.autograd.function.BackwardCFunction.apply
    save, reduce = torch.save, torch.distributed.all_reduce
    model = torch.nn.Linear(2, 2)
    with backlight.watch(model, run=tmp_path / "run", monitors="stalls"):
        model(torch.ones(1, 2)).sum().backward()
        assert torch.save is not save
        assert torch.distributed.all_reduce is not reduce
        assert "__call__" in vars(torch.nn.Linear)
        assert model.weight._post_accumulate_grad_hooks
    assert torch.autograd.function.BackwardCFunction.apply is apply
    assert torch.save is save
    assert torch.distributed.all_reduce is reduce
    assert "__call__" not in vars(torch.nn.Linear)
    assert not model.weight._post_accumulate_grad_hooks


def test_attach_to_a_missing_process_is_refused() -> None:
    with pytest.raises(
        ProcessNotFoundError, match="attach: no process 999999999; expected the id of a running"
    ):
        attach(999_999_999)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_attach_to_a_stopped_process(
    child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.1)
    with pytest.raises(SystemExit):
        main(["attach", str(child.pid), "--json"])
    printed = json.loads(capsys.readouterr().out)
    validate(printed, schema_of("attach"))
    assert printed["diagnosis"]["kind"] == "STOPPED"
    assert "the process was not started by backlight" in printed["unseen"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("py_spy", "traceable", "reasons"),
    [
        (None, True, ["py-spy is not installed"]),
        (
            "/bin/false", False,
            ["what its threads wait for in the kernel: tracing is denied", "tracing this process is denied"],
        ),
    ],
)  # fmt: skip
def test_attach_reports_what_is_not_observable(
    py_spy: str | None, traceable: bool, reasons: list[str], child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("shutil.which", lambda *_a, **_k: py_spy)
    monkeypatch.setattr(processes, "is_traceable", lambda _pid: traceable)
    found = attach(child.pid, 0.2)
    assert found.diagnosis.kind is DiagnosisKind.UNKNOWN
    for reason in reasons:
        assert any(reason in what for what in found.unseen)
    assert str(child.pid) in found.threads


def test_traceable_processes() -> None:
    assert processes.is_traceable(os.getpid())
    assert processes.is_traceable(999_999_999)  # a missing process is no denial


BLOCKED = """
import os, sys
from pathlib import Path
from backlight.watchdog import process
process.END_POLL_S = float(sys.argv[4])
process.EndGuard(Path(sys.argv[1]), int(sys.argv[2])).start()
print(flush=True)
open(sys.argv[3]).read()
"""


# Those with an interval of an hour are only reported by the kernel.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "interval"),
    [("killed", "3600"), ("finished", "0.25"), ("unreadable", "3600"), ("not open", "3600")],
)
def test_blocked_watchdog_ends_with_its_run(end: str, interval: str, directory: Path) -> None:
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    rank = subprocess.Popen(["sleep", "100"])
    shared = SharedState(runtime_dir.state_path(directory, 0))
    shared.open(rank=0, world_size=1, main_ident=1, main_tid=1, timeout_s=None)
    shared.slots[Slot.PID] = rank.pid
    if end == "unreadable":
        shared.path.unlink()
        os.mkfifo(shared.path)
    elif end == "not open":
        shared.path.unlink()
    arguments = [sys.executable, "-c", BLOCKED, str(directory), str(rank.pid), str(fifo), interval]
    blocked = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    try:
        assert blocked.stdout is not None
        blocked.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            blocked.wait(1.5)  # the rank lives
        if end == "finished":
            shared.close(RankStatus.FINISHED)
        else:
            rank.kill()
            rank.wait()
        began = time.monotonic()
        assert blocked.wait(60) == 1
        assert time.monotonic() - began > 0.5
    finally:
        blocked.kill()
        blocked.communicate()
        rank.kill()
        rank.wait()


@pytest.mark.slow
def test_end_of_a_process_that_is_reaped_meanwhile_is_known(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells it by the process until its parent has read it, and by the descriptor from then on."""
    rank = subprocess.Popen(["sleep", "100"])
    shared = SharedState(runtime_dir.state_path(directory, 0))
    shared.open(rank=0, world_size=1, main_ident=1, main_tid=1, timeout_s=None)
    shared.slots[Slot.PID] = rank.pid
    observer = RankObserver(directory, 0, StallLimits())
    observer.poll()
    rank.terminate()
    select.select([observer.pidfd], [], [])
    read = processes.read_process

    def read_late(pid: int) -> processes.Process | None:
        rank.wait()
        return read(pid)

    monkeypatch.setattr(processes, "read_process", read_late)
    observer.poll()
    if processes.exit_status(observer.pidfd) is None:
        pytest.skip("kernels before 6.15 do not keep how a process has ended")
    assert (observer.end, observer.was_terminated) == (processes.ProcessEnd(signal.SIGTERM), True)
    observer.close()


@pytest.mark.slow
@pytest.mark.parametrize("locked", [3, 1])
def test_lock_of_one_moment_is_no_wait(locked: int, directory: Path, tmp_path: Path) -> None:
    """A compilation takes one lock after the other: the last samples have to show the same one."""
    lock = tmp_path / "a.lock"
    lock.touch()
    rank = subprocess.Popen(["sleep", "100"])
    shared = SharedState(runtime_dir.state_path(directory, 0))
    shared.open(rank=0, world_size=1, main_ident=1, main_tid=rank.pid, timeout_s=1.0)
    shared.slots[Slot.PID] = rank.pid
    shared.slots[Slot.HEARTBEAT] -= 10**10
    waits = ThreadStack(
        1,
        (Frame("/lib/filelock/_api.py", 9, "BaseFileLock.acquire"),),
        variables=(("lock_filename", str(lock)),),
    )
    works = ThreadStack(1, (Frame("/lib/subprocess.py", 9, "run"),))
    now = time.monotonic_ns()
    stacks = [StackSample(now, "sampler", (waits if n >= 4 - locked else works,)) for n in range(4)]
    runtime_dir.write_document(runtime_dir.document_path(directory, 0, "stacks"), [asdict(s) for s in stacks])
    observer = RankObserver(directory, 0, StallLimits())
    try:
        observer.poll(closely=True)
        cause = observer.observe().cause
    finally:
        observer.close()
        rank.kill()
        rank.wait()
    assert (cause is not None and cause.path == str(lock)) == (locked == 3)


BORROWING = """
import os, sys
from backlight.watchdog.process import BorrowedStderr
stream = BorrowedStderr(sys.argv[1], lambda: [999_999_999, int(sys.argv[2])])
stream.write("one line\\n")
assert {os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)} == {"/dev/null"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_line_reaches_a_stream_that_the_watchdog_does_not_hold(kind: str) -> None:
    if kind == "socket":
        ours, theirs = (one.detach() for one in socket.socketpair())
    else:
        ours, theirs = os.pipe() if kind == "pipe" else os.openpty()
    watched = subprocess.Popen(["sleep", "100"], stderr=theirs)
    found = os.fstat(theirs)
    os.close(theirs)
    command = [sys.executable, "-c", BORROWING, f"{found.st_dev}:{found.st_ino}", str(watched.pid)]
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False)
        assert done.returncode == 0
        assert os.read(ours, 100).strip() == b"one line"
    except OSError as error:
        pytest.skip(f"descriptors of other processes cannot be opened here: {error}")
    finally:
        watched.kill()
        watched.wait()
        os.close(ours)


@pytest.mark.slow
def test_standard_error_that_is_no_file_is_not_inherited() -> None:
    code = "from backlight.watchdog.process import hand_over\nprint(hand_over()[0] is None)"
    command = [sys.executable, "-c", code]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert piped.stdout == "False\n"
    with tempfile.TemporaryFile() as file:
        assert subprocess.run(command, stdout=subprocess.PIPE, stderr=file, check=True).stdout == b"True\n"
