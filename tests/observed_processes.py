"""Scripts that run in processes of their own, to be observed from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backlight import processes
from backlight.watchdog.attach import attach
from backlight.watchdog.stacks import dump_by_py_spy
from backlight.watchdog.text import Diagnosis

PY_SPY = pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None,
    reason="py-spy is not installed",
)
"""Mark of tests that take stacks from outside."""

Start = Callable[..., subprocess.Popen[str]]

DEADLINE_S = 90.0


@contextlib.contextmanager
def starting() -> Iterator[Start]:
    """Yield a function that starts a script in a process, which ends with the block."""
    with contextlib.ExitStack() as stack:

        def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(_end, process)
            return process

        yield start


def _end(process: subprocess.Popen[str]) -> None:
    """End a process with its children, such as a loader's worker that would compute for ever."""
    children = processes.children(process.pid)
    process.kill()
    for child in children:
        processes.send_signal(child, signal.SIGKILL)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {DEADLINE_S:g} s")


def wait_until_in(process: subprocess.Popen[str], part: str) -> None:
    """Wait until the stack of the main thread shows a part of a path or a function."""

    def is_in() -> bool:
        assert process.poll() is None, f"the process has ended, and not reached {part}"
        sample, _ = dump_by_py_spy(process.pid)
        frames = [f for t in (sample.threads if sample else ()) if t.tid == process.pid for f in t.frames]
        return any(part in f"{f.file} {f.function}" for f in frames)

    wait_until(is_in, part)


def wait_until_computing(pid: int) -> None:
    """Wait until a process has used a core for a while."""
    before = cpu_s(pid)
    wait_until(lambda: cpu_s(pid) - before > 0.2, f"process {pid} computes")


def wait_until_idle(pid: int) -> None:
    """Wait until a process sleeps."""

    def sleeps() -> bool:
        before = cpu_s(pid)
        time.sleep(0.3)
        return cpu_s(pid) == before

    wait_until(sleeps, f"process {pid} sleeps")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    found = processes.read_process(pid)
    assert found is not None
    return found.cpu_s


def tell(process: subprocess.Popen[str]) -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def diagnosed(process: subprocess.Popen[str]) -> Diagnosis:
    """Return the diagnosis of a process from outside."""
    return attach(process.pid, 0.8).diagnosis


def free_port() -> int:
    """Return a port of the loopback device that is free now."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
