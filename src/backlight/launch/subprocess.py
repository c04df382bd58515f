"""A command that is run to its end, or ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence


def run_in_own_session(
    command: Sequence[str], *, limit: float, stdout: int, stderr: int
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; where it takes too long, or we are interrupted, nothing of it goes on.

    Parameters
    ----------
    command:
        Program and arguments. It leads a session of its own, so that what it starts is ended with it.
    limit:
        Seconds that it may take.
    stdout, stderr:
        As for :class:`subprocess.Popen`; what is piped is read as text.

    Raises
    ------
    subprocess.TimeoutExpired
        If it takes longer; it is ended by then.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=limit)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # wait, and close the pipes
        raise
    return subprocess.CompletedProcess(command, process.returncode, said, complained)
