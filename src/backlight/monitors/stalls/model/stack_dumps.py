"""Stacks from outside a process, in rising order of intrusion: its own C handler, then py-spy. No torch."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from backlight import processes
from backlight.monitors.stalls.model.stacks import StackSample, parse_faulthandler, parse_py_spy

SIGNAL = int(signal.SIGRTMIN) + 5 if hasattr(signal, "SIGRTMIN") else 0
"""The signal that asks a watched process for its stacks: the common user signals belong to others."""

DENIED = "tracing this process is denied here (it needs CAP_SYS_PTRACE, or the same user and ptrace_scope 0)"

_POLL = 0.02
PATIENCE = 0.6


def ask_handler(pidfd: int, pid: int, dump: Path) -> tuple[StackSample | None, str]:
    """Make a watched process write its stacks; return them, or None and why not.

    The signal is only sent to a process that handles it: it would end any other.
    """
    if not SIGNAL or not processes.catches(pid, SIGNAL):
        return None, "the process has no handler for the signal that asks for stacks"
    try:
        before = dump.stat().st_size
        signal.pidfd_send_signal(pidfd, SIGNAL)
    except OSError as error:
        return None, f"the process could not be asked for its stacks: {error.strerror}"
    at = time.monotonic_ns()
    deadline = time.monotonic() + PATIENCE
    last, size = before, before
    while time.monotonic() < deadline:
        time.sleep(_POLL)
        size = dump.stat().st_size
        if size > before and size == last:
            break
        last = size
    if size == before:
        return (
            None,
            "the process did not answer the signal that asks for stacks: no thread of it takes signals",
        )
    with dump.open("rb") as file:
        file.seek(before)
        text = file.read().decode("utf-8", "backslashreplace")
    return parse_faulthandler(text, at), ""


def py_spy(pid: int, *, native: bool = False, timeout: float = 5.0) -> tuple[StackSample | None, str]:
    """Take the stacks with py-spy, without pausing the process unless ``native``; None and why not."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return None, "py-spy is not installed (pip install 'backlight[stalls]')"
    at = time.monotonic_ns()
    command = [program, "dump", "--pid", str(pid), "--json", "--native" if native else "--nonblocking"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"py-spy: {error}"
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        said = f"py-spy: {lines[0] if lines else f'exit code {done.returncode}'}"
        return None, f"{DENIED} ({said})" if not processes.readable(pid) else said
    try:
        return parse_py_spy(json.loads(done.stdout), at), ""
    except (ValueError, AttributeError, TypeError) as error:
        return None, f"py-spy printed what is not understood: {error}"
