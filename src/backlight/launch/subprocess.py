"""Subprocesses with everything that they start: run within a time limit, found, and ended one by one by pid.

A command may start processes that leave its process group (torchrun gives each worker a session of its own).
They are found as descendants of its leader, by a session shared with one of them, or by the variable
:data:`MARK` in their environment. No other process is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from backlight import processes

MARK = "BACKLIGHT_PROCESS_TREE"
"""Environment variable that marks the processes of one tree; its value is unique to one start."""

WATCHDOG = "backlight.monitors.stalls.model.watchdog"
"""Part of the command of a watchdog process; it leaves the session of its run, but carries the mark."""

KILL_TIMEOUT_S = 5.0
_POLL_S = 0.05


def run_in_own_session(
    command: Sequence[str], *, limit: float, stdout: int, stderr: int
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; on a timeout or an interrupt, nothing that it started survives.

    Parameters
    ----------
    command:
        Program and arguments.
    limit:
        Seconds that it may take.
    stdout, stderr:
        As for :class:`subprocess.Popen`; what is piped is read as text.

    Raises
    ------
    subprocess.TimeoutExpired
        If it takes longer; it is ended by then.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True, errors="replace",
        start_new_session=True, env={**os.environ, MARK: mark},
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit)
    except BaseException:
        ProcessTree(process.pid, mark).end(grace=0.0)
        process.communicate()  # wait, and close the pipes
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def start(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], mark: str,
    stdout: IO[bytes], stderr: IO[bytes],
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a command without input as the leader of its own session, marked; an OSError passes through."""
    return subprocess.Popen(
        command, cwd=directory, env={**environment, MARK: mark}, stdin=subprocess.DEVNULL, stdout=stdout,
        stderr=stderr, start_new_session=True,
    )  # fmt: skip


class ProcessTree:
    """The processes that one command started, remembered over its life.

    Parameters
    ----------
    leader:
        The process that was started, in a session of its own.
    mark:
        The value of :data:`MARK` in its environment.
    """

    def __init__(self, leader: int, mark: str) -> None:
        self._leader = leader
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            self._known[leader] = psutil.Process(leader)

    def find(self) -> list[psutil.Process]:
        """Return the living processes of the tree, the leader first, then by pid."""
        table = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
        members = {pid for pid, process in self._known.items() if pid in table and process.is_running()}
        # The leader may be gone and its session live on; its pid may also belong to another process since.
        sessions = set() if self._leader in table.keys() - members else {self._leader}
        members |= {pid for pid in table if pid not in members and mark_of(table[pid]) == self._mark}
        found = members
        while found:
            sessions |= {_session(pid) for pid in found} - {os.getsid(0), 0}
            found = {
                pid
                for pid, process in table.items()
                if process.info["ppid"] in members or _session(pid) in sessions
            }
            found -= members | {os.getpid()}
            members |= found
        self._known.update({pid: table[pid] for pid in members if pid not in self._known})
        alive = [self._known[p] for p in members if table[p].info["status"] != psutil.STATUS_ZOMBIE]
        return sorted(alive, key=lambda process: (process.pid != self._leader, process.pid))

    def watchdogs(self) -> list[psutil.Process]:
        """Return the processes that only watch the others: the watchdog of ``backlight run``."""
        return [process for process in self.find() if is_watchdog(process)]

    def wait_for_watchdogs(self, timeout: float) -> None:
        """Give the watchdog time to notice that its ranks are gone and to write its findings."""
        _wait_while(self.watchdogs, timeout)

    def end(self, grace: float) -> tuple[str, ...]:
        """End the processes: SIGTERM, and SIGKILL for what is left after ``grace`` seconds.

        Returns
        -------
        tuple[str, ...]
            Which signal was sent to which processes, in words.
        """
        sent = []
        # The watchdog first: it would report the deaths that are caused here as deaths of the run.
        for process in self.watchdogs():
            if send(process, signal.SIGKILL):
                sent.append(f"SIGKILL to {process.pid}, the watchdog process")
        for number, timeout in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_TIMEOUT_S)):
            targets = self.find()
            if not targets:
                break
            pids = [str(process.pid) for process in targets if send(process, number)]
            sent.append(f"{number.name} to {', '.join(pids) or 'no process'}")
            for process in targets:
                # A stopped process handles SIGTERM only after it is continued.
                with contextlib.suppress(psutil.Error):
                    if number is signal.SIGTERM and process.status() == psutil.STATUS_STOPPED:
                        send(process, signal.SIGCONT)
            _wait_while(self.find, timeout)
        left = self.find()
        return (*sent, f"still alive: {_pids(left)}") if left else tuple(sent)


def end_marked(marks: Iterable[str]) -> None:
    """End the trees with these marks that an earlier process left running."""
    wanted = set(marks)
    for process in psutil.process_iter() if wanted else ():
        if (mark := mark_of(process)) in wanted:
            ProcessTree(process.pid, mark).end(grace=1.0)


def send(process: psutil.Process, number: int) -> bool:
    """Send a signal to exactly this process, never to another one that was given its pid since."""
    try:
        process.send_signal(number)
    except (psutil.Error, OSError):
        return False
    return True


def mark_of(process: psutil.Process) -> str:
    """Return the mark in the environment of a process, empty without one or where it is not readable."""
    return environment_of(process).get(MARK, "")


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that a process was started with, empty where it is not readable."""
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process, its name where that is not readable."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except (psutil.Error, OSError):
        return ""


def is_watchdog(process: psutil.Process) -> bool:
    """Return whether a process is a watchdog of ``backlight run``."""
    return WATCHDOG in command_of(process)


def cpu_and_delay(process: psutil.Process) -> tuple[float, float]:
    """Return the seconds that a process computed and that its threads queued for a core, so far."""
    found = processes.process(process.pid)
    threads = processes.threads(process.pid)
    return (found.ticks / processes.TICK if found else 0.0, sum(thread.waited for thread in threads) / 1e9)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _pids(found: Iterable[psutil.Process]) -> str:
    return ", ".join(str(process.pid) for process in found)


def _wait_while(find: Callable[[], object], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and find():
        time.sleep(_POLL_S)
