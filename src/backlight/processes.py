"""Processes and threads of this machine, read from ``/proc`` without touching them. No torch.

psutil reads children, arguments and environments. What it lacks is read here: exit status, start in clock
ticks, waits of single threads and run-queue delay. What is denied or gone reads as None or empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap
import os
import signal
import struct
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CGROUP = Path("/sys/fs/cgroup")

_ioctl: Callable[..., Any] | None = None
with contextlib.suppress(ImportError):
    import fcntl

    _ioctl = fcntl.ioctl

_PIDFD_INFO_BYTES = 64
_PIDFD_INFO_MASK = struct.Struct("=Q")
_PIDFD_INFO_EXIT = 1 << 3
# PIDFD_GET_INFO with the first version of its structure; the exit status is at byte 60.
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11
_PR_SET_PTRACER = 0x59616D61

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WaitReason(enum.StrEnum):
    """What a sleeping thread waits for, as the kernel reports it."""

    LOCK = "a lock"
    SLEEP = "a sleep"
    NETWORK = "the network"
    FILE_OR_NETWORK = "a file or the network"
    FILE_OR_PIPE = "a file or a pipe"
    CHILD = "a child process"
    UNKNOWN = ""


# System calls, their numbers on x86_64 and aarch64, and what a thread inside waits for.
_WAITS = (
    ("futex", 202, 98, WaitReason.LOCK),
    ("clock_nanosleep", 230, 115, WaitReason.SLEEP),
    ("nanosleep", 35, 101, WaitReason.SLEEP),
    ("hrtimer_nanosleep", None, None, WaitReason.SLEEP),
    ("epoll_wait", 232, None, WaitReason.NETWORK),
    ("epoll_pwait", 281, 22, WaitReason.NETWORK),
    ("recvfrom", 45, 207, WaitReason.NETWORK),
    ("recvmsg", 47, 212, WaitReason.NETWORK),
    ("poll", 7, None, WaitReason.FILE_OR_NETWORK),
    ("ppoll", 271, 73, WaitReason.FILE_OR_NETWORK),
    ("select", 23, None, WaitReason.FILE_OR_NETWORK),
    ("pselect6", 270, 72, WaitReason.FILE_OR_NETWORK),
    ("read", 0, 63, WaitReason.FILE_OR_PIPE),
    ("wait4", 61, 260, WaitReason.CHILD),
    ("waitid", 247, 95, WaitReason.CHILD),
    ("pause", 34, None, WaitReason.UNKNOWN),
)
_REASONS = {
    "x86_64": {str(number): reason for _, number, _, reason in _WAITS},
    "aarch64": {str(number): reason for _, _, number, reason in _WAITS},
}.get(os.uname().machine, {})


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the process table."""

    pid: int
    name: str
    state: str  # letter of the kernel: R, S, D, T, Z
    parent: int
    session: int
    start: int  # clock ticks since boot; together with the pid it identifies a process
    cpu_s: float  # of all threads
    exit_status: int = 0  # wait status, once the process is dead

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in {"T", "t"}

    @property
    def is_dead(self) -> bool:
        """Whether only its entry in the process table is left."""
        return self.state in {"Z", "X"}


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread: nanoseconds on a processor and in its run queue, number of time slices; 0 if not known."""

    tid: int
    name: str
    state: str
    cpu_s: float
    ran_ns: int = 0
    queued_ns: int = 0
    slices: int = 0


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process has ended; ``status`` is its wait status, None where that is not observable."""

    status: int | None = None
    was_gone: bool = False  # before it was observed
    for_memory: bool = False  # the kernel killed it for memory
    near_memory_kill: bool = False  # the kernel was killing for memory

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 for none."""
        return (self.status or 0) & 0x7F

    @property
    def exit_code(self) -> int | None:
        """The code that it left with, None after a signal and where it is not observable."""
        return None if self.status is None or self.signal else self.status >> 8 & 0xFF

    @property
    def is_termination(self) -> bool:
        """Whether a signal ended it that people and launchers use to end a job."""
        return self.signal in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def read_process(pid: int) -> Process | None:
    """Return the entry of a process, None where there is none."""
    status = _read_stat(Path(f"/proc/{pid}/stat"))
    if status is None:
        return None
    name, rest = status
    return Process(
        pid, name, rest[0], int(rest[1]), int(rest[3]), int(rest[19]), _cpu_s(rest),
        int(rest[49]) if len(rest) > 49 else 0,
    )  # fmt: skip


def read_process_table() -> dict[int, Process]:
    """Return all visible processes by pid."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def read_threads(pid: int) -> tuple[Thread, ...]:
    """Return the threads of a process, the main thread first; empty where there is no process."""
    try:
        tids = sorted((int(p.name) for p in Path(f"/proc/{pid}/task").iterdir()), key=lambda t: (t != pid, t))
    except OSError:
        return ()
    threads = []
    for tid in tids:
        task = Path(f"/proc/{pid}/task/{tid}")
        status = _read_stat(task / "stat")
        if status is None:
            continue
        scheduled = (0, 0, 0)
        with contextlib.suppress(OSError, ValueError):
            ran, queued, slices = map(int, (task / "schedstat").read_text(encoding="ascii").split())
            scheduled = (ran, queued, slices)
        threads.append(Thread(tid, status[0], status[1][0], _cpu_s(status[1]), *scheduled))
    return tuple(threads)


def queued_s(tid: int | None = None) -> float | None:
    """Return the seconds that a thread of this process, by default the calling one, has waited for a core.

    None where the kernel does not count them.
    """
    place = "thread-self" if tid is None else f"self/task/{tid}"
    try:
        return int(Path(f"/proc/{place}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def _read_stat(path: Path) -> tuple[str, list[str]] | None:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    # The name is in parentheses and may itself hold spaces and parentheses.
    begin, end = text.find("("), text.rfind(")")
    rest = text[end + 1 :].split()
    return (text[begin + 1 : end], rest) if len(rest) > 21 else None


def _cpu_s(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / TICKS_PER_S


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    process = read_process(pid)
    return process is not None and not process.is_dead


def is_traceable(pid: int) -> bool:
    """Return whether the kernel permits this process to trace ``pid``; True for one that is gone."""
    try:
        Path(f"/proc/{pid}/exe").readlink()
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def handles_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, without which the signal would end it."""
    caught = _status_field(str(pid), "SigCgt")
    return caught is not None and bool(int(caught, 16) >> (number - 1) & 1)


def voluntary_switches(tid: int | None) -> int | None:
    """Return how often a thread of this process yielded its core, None if that is not known."""
    switches = _status_field(f"self/task/{tid}", "voluntary_ctxt_switches")
    return None if switches is None else int(switches)


def _status_field(task: str, field: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{task}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return line.split()[1]
    return None


def send_signal(process: Process, number: int) -> bool:
    """Send a signal to exactly this process, never to another with its pid; return whether it was sent."""
    descriptor = -1
    try:
        with contextlib.suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(process.pid)
        now = read_process(process.pid)
        if now is None or now.start != process.start:
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(process.pid, number)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def wait_reason(pid: int, tid: int) -> WaitReason:
    """Return what a sleeping thread waits for, ``UNKNOWN`` where the kernel does not report it."""
    task = Path(f"/proc/{pid}/task/{tid}")
    with contextlib.suppress(OSError, IndexError):
        number = (task / "syscall").read_text(encoding="ascii").split()[0]
        if number in _REASONS:
            return _REASONS[number]
    # A call that was restarted after a signal has another number.
    with contextlib.suppress(OSError):
        channel = (task / "wchan").read_text(encoding="ascii").strip()
        named = (r for word, *_, r in _WAITS if channel.startswith(word) or f"_{word}" in channel)
        return next(named, WaitReason.UNKNOWN)
    return WaitReason.UNKNOWN


def children(pid: int) -> tuple[Process, ...]:
    """Return the direct children of a process."""
    processes = [read_process(child.pid) for child in _query(pid, "children", [])]
    return tuple(child for child in processes if child is not None)


def command_line(pid: int) -> tuple[str, ...]:
    """Return the arguments of a process, empty where they cannot be read."""
    return tuple(_query(pid, "cmdline", ()))


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with, empty where it cannot be read."""
    return dict(_query(pid, "environ", {}))


def _query(pid: int, method: str, default: Any) -> Any:
    import psutil  # noqa: PLC0415 - 50 ms, and every command imports this module

    try:
        return getattr(psutil.Process(pid), method)()
    except (psutil.Error, OSError):
        return default


def lock_holders(path: Path) -> list[int] | None:
    """Return the processes that hold an advisory lock on a file, None where that is not observable."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    rows = [line.split() for line in lines if "->" not in line]  # an arrow marks those that wait
    holders = sorted({int(row[4]) for row in rows if len(row) > 5 and row[5] == file})
    return None if any(pid <= 0 for pid in holders) else holders  # of another container


def openers(path: Path) -> list[int] | None:
    """Return the processes of this user that have a file open, None where there is no such file."""
    try:
        wanted = _identity(path.stat())
    except OSError:
        return None
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                descriptors = (process / "fd").iterdir()
                if any(_opens(descriptor, wanted) for descriptor in descriptors):
                    pids.append(int(process.name))
    return sorted(pids)


def _opens(descriptor: Path, wanted: tuple[int, int]) -> bool:
    try:
        return _identity(descriptor.stat()) == wanted
    except OSError:
        return False


def current_call(pid: int, tid: int) -> tuple[int, int] | None:
    """Return number and first argument of the system call that a thread is in, None where it is not known."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        words = Path(f"/proc/{pid}/task/{tid}/syscall").read_text(encoding="ascii").split()
        return int(words[0]), int(words[1], 16)
    return None


def open_file(pid: int, number: int) -> str:
    """Return the path of an open file of a process by its descriptor, empty where it is not known."""
    try:
        return str(Path(f"/proc/{pid}/fd/{number}").readlink())
    except OSError:
        return ""


def transfers(pid: int, tid: int = 0) -> str:
    """Return the kernel's counters of what a thread, or all of a process, has read and written so far.

    Empty if not known.
    """
    path = f"/proc/{pid}/task/{tid}/io" if tid else f"/proc/{pid}/io"
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii")
    return ""


def count_oom_kills() -> int | None:
    """Return how often the kernel has killed for memory in this control group, None where not known."""
    groups = [_CGROUP, _CGROUP / "memory"]
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                groups.insert(0, _CGROUP / controllers / path.lstrip("/"))
    files = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    for file in (*files, Path("/proc/vmstat")):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text(encoding="ascii").splitlines():
                word, _, value = line.partition(" ")
                if word == "oom_kill":
                    return int(value)
    return None


def was_killed_for_memory(pid: int) -> bool:
    """Return whether the log of the kernel, where it may be read, shows a kill of this process for memory."""
    wanted = f"Killed process {pid} (".encode()
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        while record := os.read(log, 8192):  # one record per call; the last one raises
            if wanted in record:
                return True
    except OSError:
        pass
    finally:
        os.close(log)
    return False


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of the process behind a descriptor, None where it runs or is not known."""
    # Kernels from 6.15 on keep it for the holder of a descriptor, also after the parent has read it.
    if _ioctl is None:
        return None
    buffer = bytearray(_PIDFD_INFO_BYTES)
    _PIDFD_INFO_MASK.pack_into(buffer, 0, _PIDFD_INFO_EXIT)
    try:
        _ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    if not _PIDFD_INFO_MASK.unpack_from(buffer, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    return int(struct.unpack_from("=i", buffer, 60)[0])


def allow_tracing(pid: int) -> bool:
    """Permit process ``pid`` and its children to take stacks of this process; return whether needed."""
    # Only the Yama security module asks for it; elsewhere the kernel refuses the call and nothing changes.
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
    return False


class HeldFiles:
    """Descriptors of this process that refer to some files, found when it is made.

    A script may close all descriptors, and then open files of its own under the same numbers: who wrote to a
    number, or closed it, would damage those.
    """

    def __init__(self, *paths: Path, others: Collection[int] = ()) -> None:
        wanted = set()
        for path in paths:
            with contextlib.suppress(OSError):
                wanted.add(_identity(path.stat()))
        self._identities: dict[int, tuple[int, int]] = {}
        for descriptor, identity in open_descriptors().items():
            if identity in wanted and descriptor not in others:
                self._identities[descriptor] = identity
        _held_files.add(self)

    def are_open(self) -> bool:
        """Return whether each descriptor still refers to its file; True where none was found."""
        with contextlib.suppress(OSError):
            if all(_identity(os.fstat(number)) == file for number, file in self._identities.items()):
                return True
        _lost_files.update(self._identities.values())
        return False

    def release(self) -> bool:
        """Return :meth:`are_open`, and expect nothing of them from here on: they are about to be closed."""
        are_open = self.are_open()
        if are_open:
            self._identities = {}
        return are_open


_held_files: weakref.WeakSet[HeldFiles] = weakref.WeakSet()
_lost_files: set[tuple[int, int]] = set()


def open_descriptors() -> dict[int, tuple[int, int]]:
    """Return the files of the open descriptors of this process, empty where they cannot be listed."""
    files: dict[int, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - numbers
            with contextlib.suppress(OSError):  # that of the listing itself
                files[descriptor] = _identity(os.fstat(descriptor))
    return files


def has_lost(path: Path) -> bool:
    """Return whether the script has closed descriptors of this process that referred to a file."""
    for files in list(_held_files):
        files.are_open()
    with contextlib.suppress(OSError):
        return bool(_lost_files) and _identity(path.stat()) in _lost_files
    return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the limit of a container."""
    import psutil  # noqa: PLC0415 - 50 ms, and every command imports this module

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
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    import psutil  # noqa: PLC0415 - 50 ms, and every command imports this module

    return int(psutil.Process().memory_info().rss)
