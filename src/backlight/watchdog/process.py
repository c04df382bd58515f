"""The watchdog process: one per machine, detached from the launch; it ends with the last rank. No torch.

``python -m backlight.watchdog.process DIRECTORY RUN ATTEMPT OFFSET LIMITS PID STREAM SUMMARY`` detaches
itself. It changes no watched process; if it dies, training continues unwatched. With SUMMARY it prints that
of a run whose script a signal has ended.

A process that holds the writing end of a pipe keeps its reader waiting: the watchdog opens the pipe, socket
or terminal of a watched process, or of one that started it, for the duration of one line. Only a regular
file, for which no one waits, is inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO, cast

from backlight import clock, processes
from backlight.threads import BackgroundThread, unblock_signals
from backlight.watchdog import runtime_dir
from backlight.watchdog.shared_state import read_state
from backlight.watchdog.timeouts import END_TIMEOUT_S, StallLimits

_PIDFD_GETFD = 438  # on every architecture

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
        opened = os.fstat(STDERR)
    except OSError:
        return subprocess.DEVNULL, ""
    inherited = None if stat.S_ISREG(opened.st_mode) else subprocess.DEVNULL
    return inherited, f"{opened.st_dev}:{opened.st_ino}"


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
                    status = os.stat(f"/proc/{pid}/fd/{number}")  # noqa: PTH116 - of the open file, by link
                    if (status.st_dev, status.st_ino) == self._identity:
                        yield pid, number


def ancestors(pid: int) -> list[int]:
    """Return a process and those above it, the nearest first."""
    pids: list[int] = []
    while pid > 1 and len(pids) <= MAX_ANCESTORS:
        pids.append(pid)
        process = processes.read_process(pid)
        pid = 0 if process is None else process.parent
    return pids


def _write(pid: int, number: int, data: bytes) -> None:
    path = f"/proc/{pid}/fd/{number}"
    if stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116 - as above
        with socket.socket(fileno=_duplicate_descriptor(pid, number)) as borrowed:
            borrowed.send(data, socket.MSG_DONTWAIT)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _duplicate_descriptor(pid: int, number: int) -> int:
    """Return a descriptor of this process for an open file of another one; OSError where it is denied."""
    pidfd = os.pidfd_open(pid)
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
        duplicate = int(call(_PIDFD_GETFD, pidfd, number, 0))
        if duplicate < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return duplicate
    finally:
        os.close(pidfd)


# The end of the process

END_POLL_S = 0.25
"""Interval in which the end guard reads whether a rank that lives on has reported its end."""

_BUSY_POLL_S = 0.05


class EndGuard:
    """Ends this process when the watched ones have ended and its main thread waits for something else.

    Whatever blocks it, such as a hung file system, must not keep the user's terminal or pipe open. Time in
    which the main thread ran, or had no core to run on, does not count.
    """

    def __init__(
        self, directory: Path, starter: int, timeout_s: Callable[[], float] = lambda: END_TIMEOUT_S
    ) -> None:
        self._directory, self._starter, self._timeout_s = directory, starter, timeout_s
        self._main = os.getpid()
        self._pidfds: dict[int, int] = {}

    def start(self) -> None:
        """Start the thread."""
        BackgroundThread(self._run, "backlight-end-guard").start()

    def _run(self) -> None:
        """Wait for the end of the watched processes, then for the main thread."""
        while living := self._living():
            # The kernel reports the end of a process at once.
            select.select([pidfd for pidfd in living.values() if pidfd >= 0], [], [], END_POLL_S)
        began, busy_s = clock.monotonic(), self._busy_s()
        while clock.monotonic() - began - (self._busy_s() - busy_s) < self._timeout_s():
            clock.sleep(_BUSY_POLL_S)
        os._exit(1)

    def _living(self) -> dict[int, int]:
        """Return the ranks that have neither ended nor reported so; without any, the starter if it lives.

        Each is a process with its descriptor, which is -1 where the kernel gives none.
        """
        paths = [
            runtime_dir.state_path(self._directory, rank) for rank in runtime_dir.ranks_in(self._directory)
        ]
        states = [state for path in paths if (state := read_state(path)) is not None]
        pids = [state.pid for state in states if not state.is_closed] if states else [self._starter]
        return {pid: self._pidfds.get(pid, -1) for pid in pids if self._is_alive(pid)}

    def _is_alive(self, pid: int) -> bool:
        if pid not in self._pidfds:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except OSError:
                return processes.is_alive(pid)
        return not select.select([self._pidfds[pid]], [], [], 0)[0]

    def _busy_s(self) -> float:
        main = next((t for t in processes.read_threads(self._main) if t.tid == self._main), None)
        return 0.0 if main is None else (main.ran_ns + main.queued_ns) / 1e9


def main(arguments: list[str]) -> None:
    """Detach from the starting process and watch."""
    directory, run, attempt_directory, step_offset, limits, starter, stream, summary = arguments
    starters = ancestors(int(starter))
    # A process of its own, so that a script that waits for all its children does not wait for this one.
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the other has written its pid, or has ended
        os._exit(0)
    os.close(reading)
    os.setsid()
    # Signals of the terminal or the launcher are for the ranks; the watchdog ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    unblock_signals()
    try:
        runtime_dir.write_document(Path(directory) / runtime_dir.WATCHDOG, {"pid": os.getpid()})
        os.close(writing)
        thresholds = StallLimits().override(json.loads(limits))
        # Its imports are not those of a training process, which hands its standard error over.
        from backlight.watchdog.watchdog import Watchdog  # noqa: PLC0415

        watchdog = Watchdog(
            Path(directory), Path(run), Path(attempt_directory), thresholds, int(step_offset),
            prints_summary=bool(summary),
        )  # fmt: skip
        EndGuard(Path(directory), int(starter), lambda: watchdog.end_timeout_s).start()
        if stream and not stat.S_ISREG(os.fstat(STDERR).st_mode):
            sys.stderr = cast("TextIO", BorrowedStderr(stream, lambda: [*watchdog.pids(), *starters]))
        watchdog.run()
    except Exception as error:  # noqa: BLE001 - the watched process reports it
        with contextlib.suppress(OSError):
            reason = {"pid": os.getpid(), "error": f"{type(error).__name__}: {error}"}
            runtime_dir.write_document(Path(directory) / runtime_dir.WATCHDOG, reason)


if __name__ == "__main__":
    main(sys.argv[1:])
