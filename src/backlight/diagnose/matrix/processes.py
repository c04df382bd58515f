"""The processes of one case, by ``/proc``: found, looked at, and ended one by one.

A case may start what leaves its process group (torchrun gives every worker a session of its own), so
its processes are those that descend from its leader, share a session with one of them, or carry the
mark that the case was started with in their environment. Nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "BACKLIGHT_MATRIX_CASE"
"""Environment variable that marks the processes of a case; its value is unique to one start."""

DUMP_SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 5
"""Signal at which a process under ``backlight run`` writes the stacks of its threads."""

SIDECAR = "backlight.monitors.stalls.model.watchdog"
"""What the command of a sidecar holds; it leaves the session of its case, but carries the mark."""

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table; ``started`` in clock ticks tells a reused pid apart.

    ``cpu`` is in seconds. ``state`` is the kernel's letter: R, S, D, T, Z.
    """

    pid: int
    parent: int
    session: int
    started: int
    state: str
    threads: int
    cpu: float
    name: str


def available() -> bool:
    """Tell whether this system shows its processes."""
    return (_PROC / "self" / "stat").exists()


def look(pid: int) -> Process | None:
    """Return what the process table says of ``pid``, None where it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name may hold blanks and parentheses: the last closing one ends it.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])
    return Process(
        pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0], int(fields[17]), ticks / _TICKS, name
    )


def table() -> dict[int, Process]:
    """Return all processes that can be seen."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (process := look(int(entry.name))) is not None:
            found[process.pid] = process
    return found


class Tree:
    """The processes of one case, remembered over its life.

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
        first = look(leader)
        self._known: dict[int, int] = {leader: first.started} if first is not None else {}

    def living(self, *, thorough: bool = False) -> list[Process]:
        """Return the processes of the case that are not dead, the leader first, then by pid.

        ``thorough`` also reads environments, which finds processes that left the session of a
        parent that is gone.
        """
        everything = table()
        members = {
            pid for pid, born in self._known.items() if pid in everything and everything[pid].started == born
        }
        # The leader may be gone and its session live on; a stranger may also have got its pid since.
        sessions = set() if self._leader in everything.keys() - members else {self._leader}
        if thorough:
            members |= {pid for pid in everything if pid not in members and self._marked(pid)}
        grown = True
        while grown:
            sessions |= {everything[pid].session for pid in members} - {os.getsid(0)}
            more = {p.pid for p in everything.values() if p.parent in members or p.session in sessions}
            more -= members | {os.getpid()}
            grown = bool(more)
            members |= more
        self._known.update({pid: everything[pid].started for pid in members})
        alive = [everything[pid] for pid in members if everything[pid].state not in {"Z", "X"}]
        return sorted(alive, key=lambda p: (p.pid != self._leader, p.pid))

    def _marked(self, pid: int) -> bool:
        return environment_of(pid).get(MARK) == self._mark

    def watchers(self) -> list[Process]:
        """Return those of the case's processes that only watch the others: the sidecar of `backlight run`."""
        return [p for p in self.living(thorough=True) if any(SIDECAR in part for part in command_of(p.pid))]

    def wait_for_watchers(self, patience: float) -> None:
        """Give the sidecar the time to see that its ranks are gone and to write its last words."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self.watchers():
            time.sleep(0.05)

    def end(self, grace: float) -> tuple[str, ...]:
        """End the processes of the case: SIGTERM, and SIGKILL for what is left after ``grace`` seconds.

        A sidecar goes first: it would report the deaths that are made here as deaths of the training.

        Returns
        -------
        tuple[str, ...]
            What was sent to whom, in words.
        """
        said = []
        for process in self.watchers():
            if send(process, signal.SIGKILL):
                said.append(f"SIGKILL to {process.pid}, the sidecar")
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            targets = self.living(thorough=True)
            if not targets:
                break
            sent = [str(p.pid) for p in targets if send(p, number)]
            said.append(f"{number.name} to {', '.join(sent) or 'nobody'}")
            # A stopped process takes SIGTERM only after it is continued.
            if number is signal.SIGTERM:
                for process in targets:
                    if process.state == "T":
                        send(process, signal.SIGCONT)
            _wait_for_end(self, patience)
        left = self.living(thorough=True)
        if left:
            said.append(f"still there: {', '.join(str(p.pid) for p in left)}")
        return tuple(said)


def _wait_for_end(tree: Tree, patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and tree.living():
        time.sleep(0.05)


def send(process: Process, number: int) -> bool:
    """Send a signal to exactly this process, never to another one that got its pid."""
    try:
        handle = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        handle = -1
    try:
        now = look(process.pid)
        if now is None or now.started != process.started:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(process.pid, number)
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def delay_of(pid: int) -> float:
    """Return the seconds that the threads of a process have waited for a processor so far.

    On a machine with more to do than processors, a loop gets less than a whole one; it is not idle.
    """
    total = 0
    with contextlib.suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
    return total / 1e9


def catches(pid: int, number: int) -> bool:
    """Tell whether a handler for the signal is installed; without one SIGRTMIN+5 would end the process."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def command_of(pid: int) -> tuple[str, ...]:
    """Return the arguments that a process was started with, empty where they cannot be read."""
    try:
        data = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in data.rstrip(b"\0").split(b"\0"))


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with, empty where it cannot be read."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def waits_of(pid: int) -> tuple[str, ...]:
    """Return state, kernel wait and CPU seconds of each thread: ``17 python S futex_wait 0.3 s``."""
    lines = []
    threads: Iterable[Path] = ()
    with contextlib.suppress(OSError):
        threads = sorted((_PROC / str(pid) / "task").iterdir(), key=lambda entry: int(entry.name))
    for thread in threads:
        try:
            text = (thread / "stat").read_text(encoding="utf-8", errors="replace")
            waits = (thread / "wchan").read_text(encoding="utf-8", errors="replace").strip("\0\n")
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        where = waits if waits not in {"", "0"} else "-"
        lines.append(f"{thread.name} {name} {fields[0]} {where} {cpu:.2f} s")
    return tuple(lines)
