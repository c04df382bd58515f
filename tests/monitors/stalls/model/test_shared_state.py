"""The board, the meeting place, and what is read of processes and dumps."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from backlight import processes
from backlight.monitors.stalls.instrument.stack_sampler import runs_bytecode, sample
from backlight.monitors.stalls.model import runtime_dir, stack_dumps
from backlight.monitors.stalls.model.shared_state import PHASES, RING, SharedState, Slot, State, read_state
from backlight.monitors.stalls.model.stacks import (
    find_working_thread,
    parse_faulthandler,
    parse_py_spy,
    parse_sampler_stacks,
    place,
)
from backlight.records import Phase


@pytest.fixture
def board(tmp_path: Path) -> SharedState:
    made = SharedState(tmp_path / "rank-00003.board")
    made.open(rank=3, world=4, main_ident=1, main_tid=2, stall=1.5)
    return made


def test_what_is_written_is_read(board: SharedState) -> None:
    board.node("Größe".encode())
    board.slots[Slot.PHASE] = PHASES.index(Phase.BACKWARD)
    board.slots[Slot.ROW] = 5
    state = read_state(board.path)
    assert state is not None
    assert (state.pid, state.rank, state.world, state.stall) == (os.getpid(), 3, 4, 1.5)
    assert (state.phase, state.node, state.row, state.state) == (Phase.BACKWARD, "Größe", 4, State.RUNNING)
    board.close(State.FAILED)
    closed = read_state(board.path)
    assert closed is not None
    assert closed.state is State.FAILED


def test_a_board_that_is_not_ready_is_not_read(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none") is None
    made = SharedState(tmp_path / "rank-00000.board")
    assert read_state(made.path) is None
    with pytest.raises(FileExistsError):
        SharedState(made.path)


def test_collectives_are_kept_in_a_ring(board: SharedState) -> None:
    for number in range(RING + 5):
        place = board.enter(7, number, 1, 2, f"all_reduce #{number}".encode(), waits=True)
        if number < RING + 4:
            board.leave(place, waits=True)
    state = read_state(board.path)
    assert state is not None
    assert [c.number for c in state.collectives] == list(range(5, RING + 5))
    assert state.inside
    assert state.current_call is not None
    assert (state.current_call.number, state.current_call.text) == (RING + 4, f"all_reduce #{RING + 4}")


def test_a_full_memory_is_refused_before_a_store_could_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        SharedState(tmp_path / "rank-00000.board")
    assert not list(tmp_path.iterdir())


def test_a_meeting_place_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        runtime_dir.prepare(tmp_path / "link")


def test_the_same_launch_meets_and_another_does_not(tmp_path: Path) -> None:
    one = runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one == runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 1, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 0, "b")


def test_a_process_is_seen_stopped_and_dead_with_its_cause() -> None:
    child = subprocess.Popen(["sleep", "60"])
    descriptor = os.pidfd_open(child.pid)
    try:
        seen = processes.process(child.pid)
        assert seen is not None
        assert not seen.stopped
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not (p := processes.process(child.pid)) or not p.stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        dead = processes.process(child.pid)
        assert dead is not None
        assert dead.dead
        assert processes.cause(dead.exit_code) == "killed by SIGKILL"
        child.wait()
        late = processes.exit_code_by(descriptor)
        assert late is None or processes.cause(late) == "killed by SIGKILL"
    finally:
        os.close(descriptor)
    assert processes.process(child.pid) is None
    assert processes.threads(child.pid) == ()
    assert processes.cause(3 << 8) == "ended with exit code 3"


def test_threads_and_waits_of_this_process() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    try:
        time.sleep(0.05)
        assert thread.native_id in {t.tid for t in processes.threads(os.getpid())}
        assert processes.waits_for(os.getpid(), thread.native_id or 0) == "a lock"
    finally:
        gate.set()
        thread.join()


def test_the_signal_is_only_sent_to_who_handles_it(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    descriptor = os.pidfd_open(child.pid)
    try:
        found, reason = stack_dumps.ask_handler(descriptor, child.pid, tmp_path / "dump")
        assert found is None
        assert "no handler" in reason
        assert child.poll() is None
    finally:
        os.close(descriptor)
        child.kill()
        child.wait()


def test_a_dump_by_signal_while_c_code_holds_the_interpreter_lock(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    script = tmp_path / "stuck.py"
    script.write_text(
        "import collections, faulthandler, itertools, sys\n"
        f"file = open({str(dump)!r}, 'ab', buffering=0)\n"
        f"faulthandler.register({stack_dumps.SIGNAL}, file=file, all_threads=True)\n"
        "print('ready', flush=True)\n"
        "def stuck():\n"
        "    collections.deque(itertools.repeat(0), maxlen=0)\n"
        "stuck()\n"
    )
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.1)
        descriptor = os.pidfd_open(child.pid)
        found, reason = stack_dumps.ask_handler(descriptor, child.pid, dump)
        os.close(descriptor)
        assert found is not None, reason
        frame = place(found.threads[-1])
        assert frame is not None
        assert (frame.function, frame.line) == ("stuck", 6)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_py_spy_that_is_missing_or_denied_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_a, **_k: None)
    found, reason = stack_dumps.py_spy(os.getpid())
    assert found is None
    assert "not installed" in reason
    monkeypatch.setattr("shutil.which", lambda *_a, **_k: "/bin/false")
    found, reason = stack_dumps.py_spy(os.getpid())
    assert found is None
    assert "exit code 1" in reason


def test_stacks_are_read_from_each_source() -> None:
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a/b.py", line 3 in f\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "/a/torch/autograd/graph.py", line 9 in '
        '_engine_run_backward\n  File "/a/t.py", line ??? in main\n'
    )
    dump = parse_faulthandler(text, 5)
    assert [t.ident for t in dump.threads] == [0x7F01, 0x7F02]
    assert dump.threads[1].frames[1].line == 0
    assert parse_sampler_stacks([{"at": 1}, "nonsense"]) == ()
    assert parse_sampler_stacks(None) == ()
    native = [
        {
            "thread_id": 1,
            "os_thread_id": 2,
            "frames": [{"name": "futex", "filename": "c.c"}, {"name": "f", "filename": "x.py", "line": 4}],
        }
    ]
    (thread,) = parse_py_spy(native, 1).threads
    assert (thread.native, thread.frames[0].line) == (("futex",), 4)


def test_the_thread_of_a_nested_backward_is_the_one_that_works() -> None:
    text = (
        'Thread 0x01 (most recent call first):\n  File "/me/ops.py", line 3 in backward\n'
        '  File "/x/torch/autograd/function.py", line 9 in apply\n\n'
        "Thread 0x02 (most recent call first):\n"
        '  File "/x/torch/autograd/graph.py", line 9 in _engine_run_backward'
    )
    found = find_working_thread(parse_faulthandler(text, 0), 2)
    assert found is not None
    assert found.ident == 1


def test_a_thread_that_runs_python_is_told_from_one_in_native_code() -> None:
    stop = threading.Event()
    tids: list[int] = []

    def spin() -> None:
        tids.append(threading.get_native_id())
        while not stop.is_set():
            pass

    def wait() -> None:
        tids.append(threading.get_native_id())
        ctypes.CDLL(None).usleep(600_000)

    answers: dict[str, set[bool | None]] = {}
    for work in (spin, wait):
        tids.clear()
        stop.clear()
        thread = threading.Thread(target=work)
        thread.start()
        while not tids:
            time.sleep(0.001)
        answers[work.__name__] = {runs_bytecode(tids[0]) for _ in range(4)}
        stop.set()
        thread.join()
    # A busy machine may leave either undecided; it must never turn one into the other.
    assert False not in answers["spin"]
    assert True not in answers["wait"]
    assert answers != {"spin": {None}, "wait": {None}}


def test_a_look_holds_the_line_of_every_thread() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="waiting")
    thread.start()
    try:
        taken: list[dict[str, object]] = []
        looker = threading.Thread(target=lambda: taken.append(sample(1)))
        looker.start()
        looker.join()
        (found,) = parse_sampler_stacks(taken)
        named = {t.name: t for t in found.threads}
        assert named["waiting"].frames[0].function.endswith("wait")
        mine = place(named["MainThread"])
        assert mine is not None
        assert mine.file == __file__
        assert any(f.name in mine.function for f in traceback.extract_stack())
    finally:
        gate.set()
        thread.join()
