"""What the kernel says of a process, without touching it: states, CPU time, waits. No torch.

Everything here is read from ``/proc``; what is denied or gone reads as None and is said by the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_ioctl: Callable[..., Any] | None = None
with contextlib.suppress(ImportError):
    import fcntl

    _ioctl = fcntl.ioctl

_CGROUP = Path("/sys/fs/cgroup")

_INFO_SIZE = 64
_INFO_MASK = struct.Struct("=Q")
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO_SIZE << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO with the first version of its structure; the exit status stands at byte 60."""

TICK = os.sysconf("SC_CLK_TCK")
"""Ticks per second in which the kernel counts CPU time."""

_SYSCALLS = {
    "x86_64": {
        0: "read", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep", 45: "recvfrom", 47: "recvmsg",
        61: "wait4", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6",
        271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 63: "read", 72: "pselect6", 73: "ppoll", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 207: "recvfrom", 212: "recvmsg", 260: "wait4",
    },
}  # fmt: skip
_WAITS = {
    "futex": "a lock",
    "clock_nanosleep": "a sleep",
    "nanosleep": "a sleep",
    "hrtimer_nanosleep": "a sleep",
    "epoll_wait": "the network",
    "epoll_pwait": "the network",
    "recvfrom": "the network",
    "recvmsg": "the network",
    "poll": "a file or the network",
    "ppoll": "a file or the network",
    "select": "a file or the network",
    "pselect6": "a file or the network",
    "read": "a file or a pipe",
    "wait4": "a child process",
    "waitid": "a child process",
}


@dataclass(frozen=True)
class Thread:
    """One thread.

    Attributes
    ----------
    state:
        The kernel's letter.
    ticks:
        Its CPU time, in ticks.
    ran, waited, turns:
        Nanoseconds on a processor and in the queue for one, and how often it was put on one; all 0 where the
        kernel does not say.
    wait:
        What it sleeps for, in words.
    """

    tid: int
    name: str
    state: str
    ticks: int
    ran: int = 0
    waited: int = 0
    turns: int = 0
    wait: str = ""


@dataclass(frozen=True)
class Process:
    """One process: ``ticks`` of all its threads, ``memory`` in bytes, ``exit_code`` once it is dead."""

    pid: int
    name: str
    state: str
    ticks: int
    start: int
    memory: int = 0
    exit_code: int = 0
    parent: int = 0

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger."""
        return self.state in {"T", "t"}

    @property
    def dead(self) -> bool:
        """Whether it is gone but for its entry."""
        return self.state in {"Z", "X"}


def process(pid: int) -> Process | None:
    """Return what the kernel says of a process, None where there is none."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    if fields is None:
        return None
    name, rest = fields
    return Process(
        pid=pid,
        name=name,
        state=rest[0],
        ticks=int(rest[11]) + int(rest[12]),
        start=int(rest[19]),
        memory=int(rest[21]) * os.sysconf("SC_PAGE_SIZE"),
        exit_code=int(rest[49]) if len(rest) > 49 else 0,
        parent=int(rest[1]),
    )


def alive(pid: int) -> bool:
    """Tell whether a process lives; one of which only the entry is left does not."""
    found = process(pid)
    return found is not None and not found.dead


def readable(pid: int) -> bool:
    """Tell whether the kernel lets us look into a process, as tracing it needs."""
    try:
        Path(f"/proc/{pid}/exe").readlink()
    except PermissionError:
        return False
    except OSError:
        return True  # gone, which is no denial
    return True


def threads(pid: int) -> tuple[Thread, ...]:
    """Return the threads of a process, the main thread first; empty where there is no process."""
    try:
        tids = sorted((int(p.name) for p in Path(f"/proc/{pid}/task").iterdir()), key=lambda t: (t != pid, t))
    except OSError:
        return ()
    out = []
    for tid in tids:
        fields = _stat(Path(f"/proc/{pid}/task/{tid}/stat"))
        if fields is not None:
            name, rest = fields
            out.append(Thread(tid, name, rest[0], int(rest[11]) + int(rest[12]), *_scheduled(pid, tid)))
    return tuple(out)


def _scheduled(pid: int, tid: int) -> tuple[int, int, int]:
    """Return nanoseconds on a processor and in the queue for one, and how often a thread was put on one."""
    try:
        ran, waited, turns = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0, 0, 0
    return int(ran), int(waited), int(turns)


def waits_for(pid: int, tid: int) -> str:
    """Return in words what a sleeping thread waits for, empty where the kernel does not say."""
    task = Path(f"/proc/{pid}/task/{tid}")
    with contextlib.suppress(OSError, ValueError, IndexError):
        number = (task / "syscall").read_text(encoding="ascii").split()[0]
        name = _SYSCALLS.get(os.uname().machine, {}).get(int(number), "") if number.isdecimal() else ""
        if name:  # a call that was restarted after a signal goes by another number
            return _WAITS.get(name, "")
    with contextlib.suppress(OSError):
        channel = (task / "wchan").read_text(encoding="ascii").strip()
        for word, meaning in _WAITS.items():
            if channel.startswith(word) or f"_{word}" in channel:
                return meaning
    return ""


def children(pid: int) -> tuple[Process, ...]:
    """Return the direct children of a process."""
    found: list[Process] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for word in (task / "children").read_text(encoding="ascii").split():
                    child = process(int(word))
                    if child is not None:
                        found.append(child)
    return tuple(found)


def kernel_stacks(pid: int, limit: int = 200) -> str:
    """Return the state, CPU time and wait of every thread as text, the form in which they are kept."""
    lines = ["tid      state  cpu_s    waits_for            name"]
    every = threads(pid)
    for thread in every[:limit]:
        wait = waits_for(pid, thread.tid) if thread.state in {"S", "D"} else ""
        seconds = thread.ticks / TICK
        lines.append(f"{thread.tid:<8} {thread.state:<6} {seconds:<8.2f} {wait or '-':<20} {thread.name}")
    if len(every) > limit:
        lines.append(f"and {len(every) - limit} more")
    return "\n".join(lines) + "\n"


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal, without which the signal would end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def killed_for_memory() -> int | None:
    """Return how often the kernel has killed for memory in this control group, None where it does not say."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").splitlines():
                word, _, value = line.partition(" ")
                if word == "oom_kill":
                    return int(value)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def exit_code_by(pidfd: int) -> int | None:
    """Return how the process behind a descriptor ended, as a wait status; None where the kernel does not say.

    Kernels from 6.15 on keep it for those who hold a descriptor, also after the parent has looked.
    """
    if _ioctl is None:
        return None
    buffer = bytearray(_INFO_SIZE)
    _INFO_MASK.pack_into(buffer, 0, _INFO_EXIT)
    try:
        _ioctl(pidfd, _GET_INFO, buffer)
    except OSError:
        return None
    if not _INFO_MASK.unpack_from(buffer, 0)[0] & _INFO_EXIT:
        return None
    return int(struct.unpack_from("=i", buffer, 60)[0])


def cause(exit_code: int) -> str:
    """Say in words how a process ended, from the status that its parent would get."""
    number = exit_code & 0x7F
    if number:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"ended with exit code {exit_code >> 8 & 0xFF}"


def _stat(path: Path) -> tuple[str, list[str]] | None:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    begin, end = text.find("("), text.rfind(")")
    rest = text[end + 1 :].split()
    return (text[begin + 1 : end], rest) if len(rest) > 21 else None


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the limit of a container."""
    free = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no limit, or not Linux
    return int(free)


def resident_memory() -> int:
    """Return the bytes of memory that this process has resident."""
    return int(psutil.Process().memory_info().rss)
