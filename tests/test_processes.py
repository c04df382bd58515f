"""Processes and threads from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

from backlight import processes


@pytest.mark.slow
def test_stopped_and_dead_processes_have_their_exit_status() -> None:
    child = subprocess.Popen(["sleep", "60"])
    descriptor = os.pidfd_open(child.pid)
    try:
        running = processes.read_process(child.pid)
        assert not running.is_stopped
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not (p := processes.read_process(child.pid)) or not p.is_stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        dead = processes.read_process(child.pid)
        assert dead.is_dead
        assert processes.ProcessEnd(dead.exit_status).signal == signal.SIGKILL
        child.wait()
        late = processes.exit_status(descriptor)
        assert late is None or processes.ProcessEnd(late).signal == signal.SIGKILL
    finally:
        os.close(descriptor)
    assert processes.read_process(child.pid) is None
    assert processes.read_threads(child.pid) == ()
    end = processes.ProcessEnd(3 << 8)
    assert (end.exit_code, end.signal, end.is_termination) == (3, 0, False)
    assert processes.ProcessEnd(signal.SIGTERM).is_termination
    assert processes.ProcessEnd(None).exit_code is None


def test_thread_wait_reasons_are_read() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    try:
        time.sleep(0.05)
        assert thread.native_id in {t.tid for t in processes.read_threads(os.getpid())}
        assert processes.wait_reason(os.getpid(), thread.native_id or 0) == processes.WaitReason.LOCK
    finally:
        gate.set()
        thread.join()
