"""Standard error of the watched processes, written to without being held open. No torch.

A process that holds the writing end of a pipe keeps its reader waiting: the watchdog opens the pipe, socket
or terminal of a watched process, or of one that started it, for the duration of one line. Only a regular
file, for which no one waits, is inherited.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator

from backlight import processes

STDERR = 2

COLLECTED = "BACKLIGHT_STALLS_COLLECTED"
"""Environment variable, set where a launcher prints the diagnoses of all machines: watchdogs print none."""

MAX_ANCESTORS = 8
"""Processes above the starter in which the same stream is looked for: launchers, shells."""

Identity = tuple[int, int]
"""Device and inode of an open file."""


def hand_over() -> tuple[int | None, str]:
    """Return the standard error for a watchdog process, as for Popen, and what finds the stream again."""
    if os.environ.get(COLLECTED):
        return subprocess.DEVNULL, ""
    try:
        found = os.fstat(STDERR)
    except OSError:
        return subprocess.DEVNULL, ""
    inherited = None if stat.S_ISREG(found.st_mode) else subprocess.DEVNULL
    return inherited, f"{found.st_dev}:{found.st_ino}"


class BorrowedStderr:
    """Text stream that finds its file in one of ``pids`` at each write; text that finds none is dropped."""

    def __init__(self, stream: str, pids: Callable[[], Iterable[int]]) -> None:
        device, inode = stream.split(":")
        self._identity: Identity = int(device), int(inode)
        self._pids = pids

    def write(self, text: str) -> None:
        """Write at once and without waiting, or not at all; raises nothing."""
        data = text.encode("utf-8", "backslashreplace")
        for pid, number in self._descriptors():
            with contextlib.suppress(OSError):
                _write(pid, number, data)
                return

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def _descriptors(self) -> Iterator[tuple[int, int]]:
        """Yield process and number of descriptors of the stream."""
        for pid in dict.fromkeys(self._pids()):
            for number in (STDERR, 1):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{number}")  # noqa: PTH116 - of the open file, by link
                    if (found.st_dev, found.st_ino) == self._identity:
                        yield pid, number


def ancestors(pid: int) -> list[int]:
    """Return a process and those above it, the nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) <= MAX_ANCESTORS:
        found.append(pid)
        process = processes.read_process(pid)
        pid = 0 if process is None else process.parent
    return found


def _write(pid: int, number: int, data: bytes) -> None:
    path = f"/proc/{pid}/fd/{number}"
    if stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116 - as above
        with socket.socket(fileno=processes.duplicate_descriptor(pid, number)) as borrowed:
            borrowed.send(data, socket.MSG_DONTWAIT)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
