"""Stacks of processes: dumps by signal and py-spy, parsers, and the working thread."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backlight.watchdog import runtime_dir, stacks
from backlight.watchdog.stacks import (
    Frame,
    StackSample,
    ThreadStack,
    find_working_thread,
    parse_faulthandler,
    parse_py_spy,
    user_frame,
)


@pytest.mark.slow
def test_dump_signal_is_sent_only_to_a_process_that_handles_it(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        found, reason = stacks.dump_by_signal(child.pid, child.pid, 1, tmp_path / "dump")
        assert found is None
        assert "no handler" in reason
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_dump_by_signal_while_c_code_holds_the_interpreter_lock(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    script = tmp_path / "stuck.py"
    script.write_text(
        "import collections, faulthandler, itertools, sys\n"
        f"file = open({str(dump)!r}, 'ab', buffering=0)\n"
        f"faulthandler.register({stacks.DUMP_SIGNAL}, file=file, all_threads=False)\n"
        "print('ready', flush=True)\n"
        "def stuck():\n"
        "    collections.deque(itertools.repeat(0), maxlen=0)\n"
        "stuck()\n"
    )
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        time.sleep(0.1)
        found, reason = stacks.dump_by_signal(child.pid, child.pid, 7, dump)
        assert found is not None, reason
        (thread,) = found.threads
        frame = user_frame(thread)
        assert (frame.function, frame.line, thread.ident, thread.tid) == ("stuck", 6, 7, child.pid)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


BUSY = """
import hashlib, sys, threading
from pathlib import Path
from types import SimpleNamespace
from backlight.monitors.stalls import monitor

observed = SimpleNamespace(_directory=Path(sys.argv[1]), _run=SimpleNamespace(rank=0), _dump=-1)
monitor.StallMonitor._register_dump(observed)

def deep(n):
    return deep(n - 1) + 1 if n else 0

def run():
    while True:  # memory of frames is taken and given back all the time
        deep(400)
        exec(compile("def f(n):\\n  return f(n - 1) + 1 if n else 0\\nf(150)", "made", "exec"), {})

for _ in range(2):
    threading.Thread(target=run, daemon=True).start()
print("ready", flush=True)
data = bytes(50_000_000)
while True:
    hashlib.sha256(data).digest()  # without the interpreter lock
"""


@pytest.mark.slow
def test_dumps_by_signal_do_not_crash_a_process_whose_other_threads_run(tmp_path: Path) -> None:
    """A handler that reads the frames of all threads ended this process at one of 30 signals or so."""
    child = subprocess.Popen([sys.executable, "-c", BUSY, tmp_path], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        for _ in range(400):
            stacks._signal_thread(child.pid, child.pid)
            time.sleep(0.002)
        path = runtime_dir.dump_path(tmp_path, 0)
        for _ in range(1000):
            found, reason = stacks.dump_by_signal(child.pid, child.pid, 7, path)
            if found is not None or "in a system call" not in reason:  # it may wait for the interpreter lock
                break
        assert found is not None, reason
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.slow
def test_missing_or_failing_py_spy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_a, **_k: None)
    found, reason = stacks.dump_by_py_spy(os.getpid())
    assert found is None
    assert "not installed" in reason
    monkeypatch.setattr("shutil.which", lambda *_a, **_k: "/bin/false")
    found, reason = stacks.dump_by_py_spy(os.getpid())
    assert found is None
    assert "exit code 1" in reason


def test_stacks_of_each_source_are_parsed() -> None:
    text = (
        'Stack (most recent call first):\n  File "/a/b.py", line 3 in earlier\n'
        'Stack (most recent call first):\n  File "/a/torch/autograd/graph.py", line 9 in '
        '_engine_run_backward\n  File "/a/t.py", line ??? in main\n'
    )
    assert [(f.function, f.line) for f in parse_faulthandler(text)] == [
        ("_engine_run_backward", 9), ("main", 0),
    ]  # fmt: skip
    native = [
        {
            "thread_id": 1,
            "os_thread_id": 2,
            "frames": [{"name": "futex", "filename": "c.c"}, {"name": "f", "filename": "x.py", "line": 4}],
        }
    ]
    (thread,) = parse_py_spy(native, 1).threads
    assert ([f.function for f in thread.native], thread.frames[0].line) == (["futex"], 4)


def test_thread_of_a_nested_backward_is_the_working_thread() -> None:
    nested = (Frame("/me/ops.py", 3, "backward"), Frame("/x/torch/autograd/function.py", 9, "apply"))
    waiting = (Frame("/x/torch/autograd/graph.py", 9, "_engine_run_backward"),)
    found = find_working_thread(
        StackSample(0, "sampler", (ThreadStack(1, nested), ThreadStack(2, waiting))), 2
    )
    assert found.ident == 1
