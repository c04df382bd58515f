"""What a process waits for: a row of `named_waits.py`, and the state of the system. No torch.

A wait is reported only where the state of the system agrees: a lock that no living process holds, or whose
holder does not compute; a worker that is dead. The same frames while the thread itself, or the other side,
computes are no finding.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from backlight import clock, processes
from backlight.watchdog.named_waits import (
    BUSY_WORKER,
    NamedWait,
    Other,
    WaitCause,
    find_named_wait,
    row_of,
)
from backlight.watchdog.rank_processes import WATCHDOG, ProcessNotFoundError, find_ranks
from backlight.watchdog.stacks import NATIVE_TIMEOUT_S, ThreadStack, dump_by_py_spy

WINDOW_S = 0.3
"""Time over which CPU times and states are read."""

MIN_CORES = 0.05
"""Cores in use by a process and its children above which it makes progress."""

NUM_STATES = 3
"""Readings of a state in that time: a thread that is in it in all of them stays there."""

MAX_DESCRIPTOR = 1 << 20

MAX_SAMPLED = 2
"""Workers whose native stacks are taken."""

COMPILE_WORKER = "compile_worker"
"""Part of the command of workers of torch's compiler."""

LOADER_WORKER = "pt_data_worker"
"""Name that a worker of a DataLoader gives itself."""

_OPENMP = ("OpenMP", "call torch.set_num_threads(1)")
_TOKENIZERS = ("tokenizers", "set TOKENIZERS_PARALLELISM=false")
FORK_LOCKS = (
    ("libgomp", *_OPENMP), ("libomp", *_OPENMP), ("libiomp", *_OPENMP),
    ("tokenizers", *_TOKENIZERS), ("rayon", *_TOKENIZERS),
)  # fmt: skip
"""Parts of native frames, the library whose threads do not survive a fork, and how to do without them."""


def name_wait(
    pid: int, tid: int, stack: ThreadStack | None, oom_kills_before: int | None = None
) -> WaitCause | None:
    """Return what a thread of a process waits for, None where neither its frames nor the kernel show it.

    ``oom_kills_before`` is what :func:`processes.count_oom_kills` returned when the process was well.
    """
    path = _uninterruptible_wait(pid, tid)
    if path is not None:
        return _cause(row_of("storage"), path=path)
    found = find_named_wait(stack) if stack is not None else None
    if stack is None or found is None or _runs(pid, tid):
        return None
    row, _ = found
    values = dict(reversed(stack.variables))  # the innermost counts
    path = next((str(Path(values[name]) / row.suffix) for name in row.variables if name in values), None)
    match row.other:
        case Other.NOTHING:
            return _cause(row)
        case Other.OPENERS | Other.LOCK_HOLDERS:
            return _lock_wait(row, path)
        case Other.WRITERS:
            return _input_wait(row, pid)
        case Other.RANKS:
            return _ranks_wait(row, pid)
        case Other.COMPILE_WORKERS:
            return _compile_wait(row, pid)
        case Other.LOADER_WORKERS:
            return _loader_wait(pid, oom_kills_before)


def _cause(row: NamedWait, *, progresses: bool = False, **values: object) -> WaitCause:
    return WaitCause(row.name, row.cause.format(**values), row.fix.format(**values), progresses)


# The other side


def _lock_wait(row: NamedWait, path: str | None) -> WaitCause:
    find = processes.openers if row.other is Other.OPENERS else processes.lock_holders
    holders = find(Path(path)) if path is not None else None
    busy = _computing(holders or ())
    if holders is None:
        holder = "whether a process holds it is not observable"
    elif not holders:
        holder = "no process of this machine holds it"
    else:
        does = "computes" if busy else "does not compute"
        holder = f"process {_join(holders)} holds it, and {does}"
    return _cause(row, path=path or "its path is not known", holder=holder, progresses=bool(busy))


def _input_wait(row: NamedWait, pid: int) -> WaitCause:
    """Name the other end of standard input where that is a pipe: it may be about to write."""
    given = Path(f"/proc/{pid}/fd/0")
    try:
        is_pipe = stat.S_ISFIFO(given.stat().st_mode)
    except OSError:
        is_pipe = False
    if not is_pipe:
        return _cause(row, holder="the terminal")
    writers = [p for p in processes.openers(given) or () if p not in {pid, os.getpid()}]
    busy = _computing(writers)
    words = f" of process {_join(writers)}, which {'computes' if busy else 'does not compute'}"
    return _cause(row, holder=f"a pipe{words if writers else ''}", progresses=bool(busy))


def _ranks_wait(row: NamedWait, pid: int) -> WaitCause:
    """Name ranks of this machine that are still on their way."""
    try:
        ranks, _, _ = find_ranks(pid)
    except ProcessNotFoundError:
        ranks = {}
    busy = _computing([p for p in ranks.values() if p != pid])
    if not busy:
        return _cause(row)
    words = ", ".join(f"rank {rank} (process {p})" for rank, p in ranks.items() if p in busy)
    named = _cause(row, progresses=True)
    return WaitCause(named.name, f"{named.words}; {words} computes", named.fix, progresses=True)


def _compile_wait(row: NamedWait, pid: int) -> WaitCause | None:
    children = processes.children(pid)
    # What has ended has no command any more, only its name.
    dead = [c for c in children if _has_failed(c) and c.name.startswith("python")]
    alive = [c.pid for c in children if not c.is_dead and _has_argument(c.pid, COMPILE_WORKER)]
    if alive:
        busy = _computing(alive)
        words = "and computes" if busy else "and none of its processes computes"
        return _cause(row, holder=f"process {_join(alive)} runs them, {words}", progresses=bool(busy))
    if dead:
        how = processes.describe_exit(dead[0].exit_status)
        return _cause(row, holder=f"none of them lives: process {dead[0].pid} {_was(how)}")
    return None  # it compiles in this process


def _loader_wait(pid: int, oom_kills_before: int | None) -> WaitCause | None:
    """Return why workers of a DataLoader give no batch: one is dead, in a lock, or in state D."""
    children = processes.children(pid)
    workers = [c for c in children if c.name == LOADER_WORKER]
    for worker in workers:
        if _has_failed(worker):
            how = processes.describe_exit(worker.exit_status)
            kills = processes.count_oom_kills()
            counted = None not in {kills, oom_kills_before} and (kills or 0) > (oom_kills_before or 0)
            for_memory = counted or processes.was_killed_for_memory(worker.pid)
            row = row_of("killed_worker" if "SIGKILL" in how and for_memory else "dead_worker")
            return _cause(row, holder=worker.pid, how=_was(how))
    for worker in workers:
        path = _uninterruptible_wait(worker.pid, worker.pid)
        if path is not None:
            return _cause(row_of("worker_storage"), holder=worker.pid, path=path)
    busy = _computing([worker.pid for worker in workers])
    idle = [w for w in workers if w.pid not in busy]
    locked = [w for w in idle if processes.wait_reason(w.pid, w.pid) == "a lock"]
    for worker in locked[:MAX_SAMPLED]:
        sample, _ = dump_by_py_spy(worker.pid, native=True, timeout_s=NATIVE_TIMEOUT_S)
        native = [f"{f.file} {f.function}" for t in (sample.threads if sample else ()) for f in t.native]
        for part, library, how in FORK_LOCKS:
            if any(part in frame for frame in native):
                return _cause(row_of("inherited_lock"), holder=worker.pid, library=library, how=how)
    if busy:
        return _cause(row_of(BUSY_WORKER), holder=_join(sorted(busy)), progresses=True)
    return None


def _has_failed(child: processes.Process) -> bool:
    """Return whether a child is dead by an error: a worker that has no more data ends without one."""
    return child.is_dead and child.exit_status != 0


def _was(how: str) -> str:
    return f"was {how}" if how.startswith("killed") else how


def _join(pids: Iterable[int]) -> str:
    return ", ".join(map(str, pids))


def _has_argument(pid: int, part: str) -> bool:
    return any(part in argument for argument in processes.command_line(pid))


# States


def _uninterruptible_wait(pid: int, tid: int) -> str | None:
    """Return `` on PATH``, or nothing, for a thread that stays in state D; None for any other."""
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
    return f" on {path}" if path.startswith("/") else ""


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


def _computes(pid: int, tables: list[dict[int, processes.Process]]) -> bool:
    family, size = {pid}, 0
    while size != len(family):
        size = len(family)
        family |= {p.pid for p in tables[-1].values() if p.parent in family and not _is_observer(p.pid)}
    used = _cpu_s(family, tables[-1]) - _cpu_s(family & tables[0].keys(), tables[0])
    # On an overloaded machine a process that computes waits for a core most of the time.
    ready = [p for p in family if all(p in table and table[p].state == "R" for table in tables)]
    return bool(ready) or used > MIN_CORES * WINDOW_S


def _cpu_s(pids: Iterable[int], table: Mapping[int, processes.Process]) -> float:
    return sum(table[pid].cpu_s for pid in pids if pid in table)


def _is_observer(pid: int) -> bool:
    return pid == os.getpid() or _has_argument(pid, WATCHDOG)
