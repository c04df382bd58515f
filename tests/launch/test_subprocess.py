"""A command's process tree is ended, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from backlight.diagnose.test_matrix.case_run import run_case
from backlight.diagnose.test_matrix.plan import Case
from backlight.launch.subprocess import MARK, ProcessTree, run_in_own_session
from backlight.processes import read_process, send_signal

CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-IS', '-c', {CHILD!r}, sys.argv[1]])"


def test_output_and_exit_code_are_returned() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); print(sys.stdin.read()); sys.exit(3)"
    done = run_in_own_session([sys.executable, "-c", code], limit=30, stdout=-1, stderr=-1)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n\n", "err\n")


def test_timeout_ends_the_process_tree(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-IS", "-c", PARENT, str(pid_file)]
    null = subprocess.DEVNULL
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_own_session(command, limit=4, stdout=null, stderr=null)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


class InterruptedStart(subprocess.Popen[str]):
    """Popen that an interrupt leaves before it returns, as it may on a busy machine."""

    pids: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pids.append(self.pid)
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nothing waited for them
def test_interrupt_while_a_command_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", InterruptedStart)
    monkeypatch.setattr(InterruptedStart, "pids", [])
    command = [sys.executable, "-IS", "-c", "import time; time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt):
        run_in_own_session(command, limit=4, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    case = Case("a", tuple(command), str(tmp_path), 60.0)
    with pytest.raises(KeyboardInterrupt):
        run_case(case, tmp_path)
    assert [is_running(pid) for pid in InterruptedStart.pids] == [False, False]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended


MARKED = f"of-{uuid.uuid4().hex}"
SLEEPER = "import time; print('up', flush=True); time.sleep(60)"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(code: str, *, mark: str = MARKED) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, MARK: mark},
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


LEADER = """
import subprocess, sys, time
apart = dict(start_new_session=True, stdout=subprocess.DEVNULL)
child = subprocess.Popen([sys.executable, 'child.py'], **apart)
between = subprocess.run([sys.executable, 'between.py'], stdout=subprocess.PIPE, text=True)
print(child.pid, between.stdout, flush=True)
time.sleep(60)
"""

BETWEEN = """
import subprocess, sys
apart = dict(start_new_session=True, stdout=subprocess.DEVNULL)
print(subprocess.Popen([sys.executable, 'child.py'], **apart).pid)
"""


def test_descendants_are_ended_and_no_other_process(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "child.py").write_text(SLEEPER)
    (tmp_path / "between.py").write_text(BETWEEN)
    bystander = start(SLEEPER, mark=f"not-{MARKED}")
    # A child in a session of its own, and a grandchild whose parent ends at once.
    leader = start(LEADER)
    assert bystander.stdout.readline() == "up\n"
    child, orphan = (int(word) for word in leader.stdout.readline().split())
    tree = ProcessTree(leader.pid, MARKED)
    found = [p.pid for p in tree.find()]
    assert found[0] == leader.pid
    assert set(found) == {leader.pid, child, orphan}
    sent = tree.end(grace=3)
    leader.wait(5)
    assert sent == (f"SIGTERM to {', '.join(str(pid) for pid in found)}",)
    assert tree.find() == []
    assert bystander.poll() is None


def test_process_that_ignores_sigterm_is_killed(start: Start) -> None:
    leader = start(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}")
    assert leader.stdout.readline() == "up\n"
    sent = ProcessTree(leader.pid, MARKED).end(grace=0.3)
    assert sent == (f"SIGTERM to {leader.pid}", f"SIGKILL to {leader.pid}")
    assert leader.wait(5) == -signal.SIGKILL


def test_stopped_process_is_ended(start: Start) -> None:
    leader = start(SLEEPER)
    assert leader.stdout.readline() == "up\n"
    os.kill(leader.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not read_process(leader.pid).is_stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ProcessTree(leader.pid, MARKED).end(grace=3) == (f"SIGTERM to {leader.pid}",)
    assert leader.wait(5) == -signal.SIGTERM


def test_signal_is_not_sent_to_a_reused_pid(start: Start) -> None:
    leader = start(SLEEPER)
    assert leader.stdout.readline() == "up\n"
    now = read_process(leader.pid)
    assert not send_signal(replace(now, start=now.start - 1), signal.SIGKILL)
    assert leader.poll() is None
