"""Subprocesses with everything that they start: run within a time limit, found, and ended one by one by pid.

A command may start processes that leave its process group (torchrun gives each worker a session of its own).
They are found as descendants of its leader, by a session shared with one of them, or by the variable
:data:`MARK` in their environment. No other process is ever signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from backlight import processes
from backlight.distributed import WATCHDOG
from backlight.processes import Process, send_signal

MARK = "BACKLIGHT_PROCESS_TREE"
"""Environment variable that marks the processes of one tree; its value is unique to one start."""

KILL_TIMEOUT_S = 5.0
_POLL_S = 0.05


def run_in_own_session(
    command: Sequence[str], *, limit: float | None, stdout: int, stderr: int,
    directory: str | None = None, environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command without input; on a timeout or an interrupt, nothing that it started survives."""
    mark, process = uuid.uuid4().hex, None
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True, errors="replace",
            start_new_session=True, cwd=directory,
            env={**(os.environ if environment is None else environment), MARK: mark},
        )  # fmt: skip
        output, errors = process.communicate(timeout=limit)
    except BaseException:
        if process is None:  # interrupted inside Popen, which may have started it
            end_marked([mark])
        else:
            ProcessTree(process.pid, mark).end(grace=0.0)
            process.communicate()  # wait, and close the pipes
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def start(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], mark: str,
    stdout: IO[bytes] | int | None, stderr: IO[bytes] | None, *, inherit: Sequence[int] = (),
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a command without input as the leader of its own session, marked; an OSError passes through.

    It inherits the open files ``inherit``.
    """
    return subprocess.Popen(
        command, cwd=directory, env={**environment, MARK: mark}, stdin=subprocess.DEVNULL, stdout=stdout,
        stderr=stderr, start_new_session=True, pass_fds=inherit,
    )  # fmt: skip


class ProcessTree:
    """The processes that the one with the pid ``leader`` started, remembered over its life."""

    def __init__(self, leader: int, mark: str) -> None:
        self._leader = leader
        self._mark = mark
        first = processes.read_process(leader)
        self._starts = {leader: first.start} if first is not None else {}

    def find(self) -> list[Process]:
        """Return the living processes of the tree, the leader first, then by pid."""
        table = processes.read_process_table()
        members = {pid for pid, start in self._starts.items() if pid in table and table[pid].start == start}
        # The leader may be gone and its session live on; its pid may also belong to another process since.
        sessions = set() if self._leader in table.keys() - members else {self._leader}
        members |= {pid for pid in table if pid not in members and mark_of(pid) == self._mark}
        while True:
            sessions |= {table[pid].session for pid in members} - {os.getsid(0)}
            more = {p.pid for p in table.values() if p.parent in members or p.session in sessions}
            more -= members | {os.getpid()}
            if not more:
                break
            members |= more
        self._starts.update({pid: table[pid].start for pid in members})
        alive = [table[pid] for pid in members if not table[pid].is_dead]
        return sorted(alive, key=lambda process: (process.pid != self._leader, process.pid))

    def watchdogs(self) -> list[Process]:
        """Return the processes that only watch the others: the watchdog of ``backlight run``."""
        return [process for process in self.find() if is_watchdog(process.pid)]

    def wait_for_watchdogs(self, timeout: float) -> None:
        """Give the watchdog time to notice that its ranks are gone and to write its findings."""
        _wait_while(self.watchdogs, timeout)

    def end(self, grace: float) -> tuple[str, ...]:
        """End the processes by SIGTERM, after ``grace`` seconds by SIGKILL; return in words what was sent."""
        sent = []
        # The watchdog first: it would report the deaths that are caused here as deaths of the run.
        for process in self.watchdogs():
            if send_signal(process, signal.SIGKILL):
                sent.append(f"SIGKILL to {process.pid}, the watchdog process")
        for number, timeout in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_TIMEOUT_S)):
            targets = self.find()
            if not targets:
                break
            pids = [str(process.pid) for process in targets if send_signal(process, number)]
            sent.append(f"{number.name} to {', '.join(pids) or 'no process'}")
            for process in targets:
                # A stopped process handles SIGTERM only after it is continued.
                if number is signal.SIGTERM and process.is_stopped:
                    send_signal(process, signal.SIGCONT)
            _wait_while(self.find, timeout)
        left = self.find()
        return (
            (*sent, f"still alive: {', '.join(str(process.pid) for process in left)}")
            if left
            else tuple(sent)
        )


def end_marked(marks: Iterable[str]) -> None:
    """End the trees with these marks that an earlier process, or an interrupted start, left running."""
    wanted = set(marks)
    for pid in processes.read_process_table() if wanted else ():
        if (mark := mark_of(pid)) in wanted:
            ProcessTree(pid, mark).end(grace=1.0)


def mark_of(pid: int) -> str:
    """Return the mark in the environment of a process, empty without one or where it is not readable."""
    return processes.environment(pid).get(MARK, "")


def is_watchdog(pid: int) -> bool:
    """Return whether a process is a watchdog of ``backlight run``."""
    return any(WATCHDOG in part for part in processes.command_line(pid))


def _wait_while(find: Callable[[], object], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and find():
        time.sleep(_POLL_S)
