"""Stacks of processes: dumps by signal and py-spy, parsers, and the working thread."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backlight.monitors.stalls.model import stacks
from backlight.monitors.stalls.model.stacks import (
    find_working_thread,
    parse_faulthandler,
    parse_py_spy,
    user_frame,
)


def test_dump_signal_is_sent_only_to_a_process_that_handles_it(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    descriptor = os.pidfd_open(child.pid)
    try:
        found, reason = stacks.dump_by_signal(descriptor, child.pid, tmp_path / "dump")
        assert found is None
        assert "no handler" in reason
        assert child.poll() is None
    finally:
        os.close(descriptor)
        child.kill()
        child.wait()


def test_dump_by_signal_while_c_code_holds_the_interpreter_lock(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    script = tmp_path / "stuck.py"
    script.write_text(
        "import collections, faulthandler, itertools, sys\n"
        f"file = open({str(dump)!r}, 'ab', buffering=0)\n"
        f"faulthandler.register({stacks.DUMP_SIGNAL}, file=file, all_threads=True)\n"
        "print('ready', flush=True)\n"
        "def stuck():\n"
        "    collections.deque(itertools.repeat(0), maxlen=0)\n"
        "stuck()\n"
    )
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        time.sleep(0.1)
        descriptor = os.pidfd_open(child.pid)
        found, reason = stacks.dump_by_signal(descriptor, child.pid, dump)
        os.close(descriptor)
        assert found is not None, reason
        frame = user_frame(found.threads[-1])
        assert (frame.function, frame.line) == ("stuck", 6)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


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
        'Thread 0x00007f01 (most recent call first):\n  File "/a/b.py", line 3 in f\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "/a/torch/autograd/graph.py", line 9 in '
        '_engine_run_backward\n  File "/a/t.py", line ??? in main\n'
    )
    dump = parse_faulthandler(text, 5)
    assert [t.ident for t in dump.threads] == [0x7F01, 0x7F02]
    assert dump.threads[1].frames[1].line == 0
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
    text = (
        'Thread 0x01 (most recent call first):\n  File "/me/ops.py", line 3 in backward\n'
        '  File "/x/torch/autograd/function.py", line 9 in apply\n\n'
        "Thread 0x02 (most recent call first):\n"
        '  File "/x/torch/autograd/graph.py", line 9 in _engine_run_backward'
    )
    found = find_working_thread(parse_faulthandler(text, 0), 2)
    assert found.ident == 1
