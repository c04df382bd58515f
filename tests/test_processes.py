"""Processes and threads from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

from backlight import processes


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
        assert processes.describe_exit(dead.exit_status) == "killed by SIGKILL"
        child.wait()
        late = processes.exit_status(descriptor)
        assert late is None or processes.describe_exit(late) == "killed by SIGKILL"
    finally:
        os.close(descriptor)
    assert processes.read_process(child.pid) is None
    assert processes.read_threads(child.pid) == ()
    assert processes.describe_exit(3 << 8) == "ended with exit code 3"


def test_thread_wait_reasons_are_read() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    try:
        time.sleep(0.05)
        assert thread.native_id in {t.tid for t in processes.read_threads(os.getpid())}
        assert processes.wait_reason(os.getpid(), thread.native_id or 0) == "a lock"
    finally:
        gate.set()
        thread.join()
