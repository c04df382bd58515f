"""Waits that have a name: the frames that show each, and what the state of the system adds. No torch.

A wait is reported only where the state of the system agrees: a lock that no living process holds, or whose
holder does not compute; a worker that is dead. The same frames while the thread itself, or the other side,
computes are no finding.
"""

from __future__ import annotations

import enum
import itertools
import os
import signal
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backlight import clock, processes
from backlight.distributed import WATCHDOG, ProcessNotFoundError, find_ranks
from backlight.processes import ProcessEnd, WaitReason
from backlight.user_code import is_third_party, is_user_code
from backlight.watchdog.stacks import NATIVE_TIMEOUT_S, Frame, ThreadStack, dump_by_py_spy

DEPTH = 12
"""Innermost frames in which a wait shows."""

LOADER = "torch/utils/data/dataloader.py"

WINDOW_S = 0.3
"""Time over which CPU times and states are read."""

MIN_CORES = 0.05
"""Cores in use by a process and its children above which it makes progress."""

NUM_STATES = 3
"""Readings of a state in that time: a thread that is in it in all of them stays there."""

MAX_DESCRIPTOR = 1 << 20

_WORKER_LOOP = "torch/utils/data/_utils/worker.py"

MAX_SAMPLED = 4
"""Workers whose stacks are taken."""

_QUEUE_FILES = ("multiprocessing/queues.py", "multiprocessing/resource_sharer.py")
"""Files of the threads by which a worker hands its batches over."""

_SHARED_LOCK = "_multiprocessing_SemLock"
"""Part of the function in C that waits for a lock of the script which processes share."""

COMPILE_WORKER = "compile_worker"
"""Part of the command of workers of torch's compiler."""

LOADER_WORKER = "pt_data_worker"
"""Name that a worker of a DataLoader gives itself."""


class Other(enum.Enum):
    """What the other side of a wait is, by which its processes are found."""

    NOTHING = enum.auto()
    OPENERS = enum.auto()  # of the path
    LOCK_HOLDERS = enum.auto()  # of the path
    WRITERS = enum.auto()  # of standard input
    RANKS = enum.auto()  # of the job that are elsewhere
    COMPILE_WORKERS = enum.auto()
    LOADER_WORKERS = enum.auto()


class WaitName(enum.StrEnum):
    """Name of a wait."""

    EXTENSION_LOCK = "extension_lock"
    FILE_LOCK = "file_lock"
    INPUT = "input"
    BREAKPOINT = "breakpoint"
    RENDEZVOUS = "rendezvous"
    NODE_RENDEZVOUS = "node_rendezvous"
    GROUP_CREATION = "group_creation"
    COMPILE_WORKERS = "compile_workers"
    DEAD_WORKER = "dead_worker"
    KILLED_WORKER = "killed_worker"
    INHERITED_LOCK = "inherited_lock"
    LOCKED_WORKER = "locked_worker"
    WORKER_STORAGE = "worker_storage"
    BUSY_WORKER = "busy_worker"
    STORAGE = "storage"


FOR_RANKS = {WaitName.RENDEZVOUS, WaitName.NODE_RENDEZVOUS, WaitName.GROUP_CREATION}
"""Waits whose cause is another rank."""


class ForkLibrary(enum.Enum):
    """A library whose threads do not survive a fork."""

    OPENMP = enum.auto()
    TOKENIZERS = enum.auto()
    POLARS = enum.auto()
    ARROW = enum.auto()
    OPENCV = enum.auto()


FORK_LIBRARIES = {
    "polars": ForkLibrary.POLARS, "libarrow": ForkLibrary.ARROW, "pyarrow": ForkLibrary.ARROW,
    "cv2": ForkLibrary.OPENCV, "libopencv": ForkLibrary.OPENCV,
    "libgomp": ForkLibrary.OPENMP, "libomp": ForkLibrary.OPENMP, "libiomp": ForkLibrary.OPENMP,
    "tokenizers": ForkLibrary.TOKENIZERS, "rayon": ForkLibrary.TOKENIZERS,
}  # fmt: skip
"""Libraries by a part of their native frames, or of the files of their Python frames; the first counts."""


@dataclass(frozen=True)
class NamedWait:
    """A wait: frames by part of the path and function (empty: any)."""

    name: WaitName
    file: str
    functions: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()  # local variables that hold the path
    suffix: str = ""  # of the path below the value of the variable
    other: Other = Other.NOTHING


TABLE = (
    NamedWait(
        WaitName.EXTENSION_LOCK, "torch/utils/file_baton.py", ("wait",), ("build_directory",), "lock",
        other=Other.OPENERS,
    ),
    NamedWait(
        WaitName.FILE_LOCK, "filelock/", ("acquire", "_poll_until_acquired"),
        ("lock_filename", "canonical_path"), other=Other.LOCK_HOLDERS,
    ),
    NamedWait(WaitName.BREAKPOINT, "/pdb.py"),
    NamedWait(
        WaitName.RENDEZVOUS, "torch/distributed/rendezvous.py", ("_create_c10d_store",), other=Other.RANKS
    ),
    NamedWait(WaitName.NODE_RENDEZVOUS, "torch/distributed/elastic/rendezvous/"),
    NamedWait(
        WaitName.GROUP_CREATION, "torch/distributed/distributed_c10d.py",
        ("_new_process_group_helper", "_store_based_barrier", "new_group", "_new_group_with_tag"),
        other=Other.RANKS,
    ),
    NamedWait(
        WaitName.COMPILE_WORKERS, "torch/_inductor/", ("wait", "_wait_futures", "result"),
        other=Other.COMPILE_WORKERS,
    ),
    # Its worker decides which of the waits for one it is.
    NamedWait(WaitName.DEAD_WORKER, LOADER, other=Other.LOADER_WORKERS),
)  # fmt: skip

INPUT = NamedWait(WaitName.INPUT, "", other=Other.WRITERS)
"""The wait that no frame shows: ``input`` is a function in C."""


@dataclass(frozen=True)
class WorkerStack:
    """Where a worker of a DataLoader is: its innermost line of the user's code, and what it waits for."""

    pid: int
    frame: Frame
    frames: tuple[Frame, ...] = field(default=(), compare=False)
    wait: WaitReason = WaitReason.UNKNOWN

    @property
    def line(self) -> str:
        """The line with its function."""
        return f"{self.frame.location} in {self.frame.qualified_name}"


@dataclass(frozen=True)
class WaitCause:
    """What a process waits for, by a row of the table and the state of the system."""

    name: WaitName
    progresses: bool = False  # what it waits for computes
    path: str = ""  # of the file; empty where it is not known
    pids: tuple[int, ...] | None = ()  # processes of the other side; None where they are not observable
    ranks: tuple[int, ...] = ()  # of those processes, where they are ranks
    end: ProcessEnd | None = None  # of the worker, where it is dead
    is_pipe: bool = False  # standard input is one
    library: ForkLibrary | None = None
    line: str = ""  # of the worker, where its stack is known


def find_named_wait(stack: ThreadStack) -> tuple[NamedWait, Frame] | None:
    """Return the row of the table that the innermost frames show."""
    frames = stack.frames[:DEPTH]
    if stack.called == "input" and frames:
        return INPUT, frames[0]
    for frame in frames:
        file, function = frame.file.replace("\\", "/"), frame.function.rpartition(".")[2]
        for row in TABLE:
            if row.file in file and (not row.functions or function in row.functions):
                return row, frame
    return None


def variables_of(stack: ThreadStack) -> tuple[str, ...]:
    """Return the names of local variables that hold what a stack waits for."""
    named = find_named_wait(stack)
    return named[0].variables if named is not None else ()


def name_wait(
    pid: int, tid: int, stack: ThreadStack | None, oom_kills_before: int | None = None
) -> WaitCause | None:
    """Return what a thread of a process waits for, None where neither its frames nor the kernel show it.

    ``oom_kills_before`` is what :func:`processes.count_oom_kills` returned when the process was well.
    """
    path = _uninterruptible_wait(pid, tid)
    if path is not None:
        return WaitCause(WaitName.STORAGE, path=path)
    named = find_named_wait(stack) if stack is not None else None
    if stack is None or named is None or _runs(pid, tid):
        return None
    row, _ = named
    values = dict(reversed(stack.variables))  # the innermost counts
    path = next((str(Path(values[name]) / row.suffix) for name in row.variables if name in values), "")
    match row.other:
        case Other.NOTHING:
            return WaitCause(row.name)
        case Other.OPENERS | Other.LOCK_HOLDERS:
            return _lock_wait(row, path)
        case Other.WRITERS:
            return _input_wait(pid)
        case Other.RANKS:
            return _ranks_wait(row.name, pid)
        case Other.COMPILE_WORKERS:
            return _compile_wait(pid)
        case Other.LOADER_WORKERS:
            return _loader_wait(pid, oom_kills_before)


# The other side


def _lock_wait(row: NamedWait, path: str) -> WaitCause:
    find = processes.openers if row.other is Other.OPENERS else processes.lock_holders
    holders = find(Path(path)) if path else None
    busy = _computing(holders or ())
    return WaitCause(row.name, bool(busy), path, None if holders is None else tuple(holders))


def _input_wait(pid: int) -> WaitCause:
    """Name the other end of standard input where that is a pipe: it may be about to write."""
    stdin = Path(f"/proc/{pid}/fd/0")
    try:
        is_pipe = stat.S_ISFIFO(stdin.stat().st_mode)
    except OSError:
        is_pipe = False
    writers = [p for p in processes.openers(stdin) or () if p not in {pid, os.getpid()}] if is_pipe else []
    return WaitCause(WaitName.INPUT, bool(_computing(writers)), pids=tuple(writers), is_pipe=is_pipe)


def _ranks_wait(name: WaitName, pid: int) -> WaitCause:
    """Name ranks of this machine that are still on their way."""
    try:
        ranks, _, _ = find_ranks(pid)
    except ProcessNotFoundError:
        ranks = {}
    busy = _computing([p for p in ranks.values() if p != pid])
    computing = {rank: p for rank, p in ranks.items() if p in busy}
    return WaitCause(name, bool(busy), pids=tuple(computing.values()), ranks=tuple(computing))


def _compile_wait(pid: int) -> WaitCause | None:
    children = processes.children(pid)
    # What has ended has no command any more, only its name.
    dead = [c for c in children if _has_failed(c) and c.name.startswith("python")]
    alive = [c.pid for c in children if not c.is_dead and _has_argument(c.pid, COMPILE_WORKER)]
    if alive:
        return WaitCause(WaitName.COMPILE_WORKERS, bool(_computing(alive)), pids=tuple(alive))
    if dead:
        return WaitCause(WaitName.COMPILE_WORKERS, pids=(dead[0].pid,), end=ProcessEnd(dead[0].exit_status))
    return None  # it compiles in this process


def _loader_wait(pid: int, oom_kills_before: int | None) -> WaitCause | None:
    """Return why workers of a DataLoader give no batch: one is dead, in a lock, or in state D."""
    children = processes.children(pid)
    workers = [c for c in children if c.name == LOADER_WORKER]
    for worker in workers:
        if _has_failed(worker):
            end = ProcessEnd(worker.exit_status)
            kills = processes.count_oom_kills()
            counted = None not in {kills, oom_kills_before} and (kills or 0) > (oom_kills_before or 0)
            for_memory = end.signal == signal.SIGKILL and (
                counted or processes.was_killed_for_memory(worker.pid)
            )
            name = WaitName.KILLED_WORKER if for_memory else WaitName.DEAD_WORKER
            return WaitCause(name, pids=(worker.pid,), end=end)
    for worker in workers:
        path = _uninterruptible_wait(worker.pid, worker.pid)
        if path is not None:
            return WaitCause(WaitName.WORKER_STORAGE, path=path, pids=(worker.pid,))
    busy = _computing([worker.pid for worker in workers])
    idle = [w for w in workers if w.pid not in busy]
    locked = [w.pid for w in idle if processes.wait_reason(w.pid, w.pid) is WaitReason.LOCK]
    others = [w.pid for w in idle if w.pid not in locked]
    # One that loads, or is not sampled, may hold a lock that they share.
    is_alone = not busy and len(others) <= MAX_SAMPLED and not (locked and worker_stacks(others))
    for worker_pid in locked[:MAX_SAMPLED]:
        cause = _worker_lock(worker_pid, is_alone=is_alone)
        if cause is not None:
            return cause
    if busy:
        pids = tuple(sorted(busy))
        line = next((worker.line for worker in worker_stacks(pids[:1])), "")
        return WaitCause(WaitName.BUSY_WORKER, progresses=True, pids=pids, line=line)
    return None


def worker_stacks(pids: Iterable[int]) -> tuple[WorkerStack, ...]:
    """Return where some workers of a DataLoader are in the user's code, by py-spy.

    A worker that waits for work is left out.
    """
    located = []
    for pid in itertools.islice(pids, MAX_SAMPLED):
        sample, _ = dump_by_py_spy(pid)
        stack = _worker_stack(pid, sample.threads if sample else ())
        if stack is not None:
            located.append(stack)
    return tuple(located)


def _worker_stack(pid: int, threads: Iterable[ThreadStack]) -> WorkerStack | None:
    """Return the frames above the loop of a worker: one that was forked has those of the script below it."""
    for thread in threads:
        inside = tuple(itertools.takewhile(lambda f: not f.file.endswith(_WORKER_LOOP), thread.frames))
        frame = next((frame for frame in inside if is_user_code(frame.file)), None)
        if frame is not None and len(inside) < len(thread.frames):
            return WorkerStack(pid, frame, inside, processes.wait_reason(pid, pid))
    return None


def children_compute(pid: int) -> bool:
    """Return whether a process that this one has started computes."""
    return bool(_computing([child.pid for child in processes.children(pid) if not _is_observer(child.pid)]))


def _worker_lock(pid: int, *, is_alone: bool) -> WaitCause | None:
    """Return the lock that a worker cannot get: of a library, of threads before its fork, or of the script.

    ``is_alone``: no other worker computes or loads, which could hold a lock that they share.
    """
    sample, _ = dump_by_py_spy(pid, native=True, timeout_s=NATIVE_TIMEOUT_S)
    threads = sample.threads if sample else ()
    texts = [f"{frame.file} {frame.function}" for thread in threads for frame in thread.native]
    texts += [f.file for thread in threads for f in thread.frames if is_third_party(f.file)]
    stack = _worker_stack(pid, threads)
    line = stack.line if stack is not None else ""
    for part, library in FORK_LIBRARIES.items():
        if any(part in text for text in texts):
            return WaitCause(WaitName.INHERITED_LOCK, pids=(pid,), library=library, line=line)
    # Its one thread that works can be woken by another process only, and these do nothing.
    working_tids = {thread.tid for thread in processes.read_threads(pid)}
    working_tids -= {
        thread.tid for thread in threads if any(f.file.endswith(_QUEUE_FILES) for f in thread.frames[-6:])
    }
    if not is_alone or working_tids != {pid} or _runs(pid, pid):
        return None
    is_taken = stack is not None and stack.frame == stack.frames[0]  # by the script, in this call or before
    is_shared = any(_SHARED_LOCK in text for text in texts)
    name = WaitName.LOCKED_WORKER if is_taken or (line and is_shared) else WaitName.INHERITED_LOCK
    return WaitCause(name, pids=(pid,), line=line)


def _has_failed(child: processes.Process) -> bool:
    """Return whether a child is dead by an error: a worker that has no more data ends without one."""
    return child.is_dead and child.exit_status != 0


def _has_argument(pid: int, part: str) -> bool:
    return any(part in argument for argument in processes.command_line(pid))


# States


def _uninterruptible_wait(pid: int, tid: int) -> str | None:
    """Return the path on which a thread stays in state D, empty where not known; None for any other."""
    transfers = processes.transfers(pid, tid)
    for _ in range(NUM_STATES):
        thread = next((t for t in processes.read_threads(pid) if t.tid == tid), None)
        if thread is None or thread.state != "D":
            return None
        clock.sleep(WINDOW_S / NUM_STATES)
    if processes.transfers(pid, tid) != transfers:
        return None  # slow, but it moves
    call = processes.current_call(pid, tid)
    path = processes.open_file(pid, call[1]) if call is not None and call[1] < MAX_DESCRIPTOR else ""
    return path if path.startswith("/") else ""


def _runs(pid: int, tid: int) -> bool:
    """Return whether a thread itself uses a core, or is ready to whenever its state is read."""
    states, seconds = set(), []
    for count in range(NUM_STATES):
        if count:
            clock.sleep(WINDOW_S / (NUM_STATES - 1))
        thread = next((t for t in processes.read_threads(pid) if t.tid == tid), None)
        if thread is None:
            return False
        states.add(thread.state)
        seconds.append(thread.cpu_s)
    return states == {"R"} or seconds[-1] - seconds[0] > MIN_CORES * WINDOW_S


def _computing(pids: Collection[int]) -> set[int]:
    """Return those processes that use a core, themselves or by a descendant."""
    if not pids:
        return set()
    tables = []
    for count in range(NUM_STATES):
        if count:
            clock.sleep(WINDOW_S / (NUM_STATES - 1))
        tables.append(processes.read_process_table())
    return {pid for pid in pids if _computes(pid, tables)}


def descendants(pid: int, table: Mapping[int, processes.Process]) -> set[int]:
    """Return a process with all that it has started, backlight's own left out."""
    family, size = {pid}, 0
    while size != len(family):
        size = len(family)
        family |= {p.pid for p in table.values() if p.parent in family and not _is_observer(p.pid)}
    return family


def _computes(pid: int, tables: list[dict[int, processes.Process]]) -> bool:
    family = descendants(pid, tables[-1])
    used = cpu_s(family, tables[-1]) - cpu_s(family & tables[0].keys(), tables[0])
    # On an overloaded machine a process that computes waits for a core most of the time.
    ready = [p for p in family if all(p in table and table[p].state == "R" for table in tables)]
    return bool(ready) or used > MIN_CORES * WINDOW_S


def cpu_s(pids: Iterable[int], table: Mapping[int, processes.Process]) -> float:
    """Return the processor seconds that processes have taken so far."""
    return sum(table[pid].cpu_s for pid in pids if pid in table)


def _is_observer(pid: int) -> bool:
    return pid == os.getpid() or _has_argument(pid, WATCHDOG)
