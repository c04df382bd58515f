"""A command in a session of its own ends whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from backlight.launch.subprocess import run_in_own_session

CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-IS', '-c', {CHILD!r}, sys.argv[1]])"


def test_what_it_said_and_how_it_ended() -> None:
    said = "import sys; print('out'); print('err', file=sys.stderr); print(sys.stdin.read()); sys.exit(3)"
    done = run_in_own_session([sys.executable, "-c", said], limit=30, stdout=-1, stderr=-1)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n\n", "err\n")


def test_what_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_own_session(
            [sys.executable, "-IS", "-c", PARENT, str(noted)],
            limit=4,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    child = int(noted.read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # one that nobody has waited for is over as well
