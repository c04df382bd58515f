"""Waits that have a name: the frames that show each, what it waits for, and the fix. No torch.

One table. A wait is reported only where the state of the system agrees: a lock that no living process holds,
or whose holder does not compute; a wait for a terminal. The same frames while the other side computes are no
finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backlight import clock, processes
from backlight.monitors.stalls.model.stacks import Frame, ThreadStack, dump_by_py_spy

DEPTH = 12
"""Innermost frames in which a wait shows."""

HOLDER_WINDOW_S = 0.3
"""Time over which the CPU time of a holder is measured."""

MIN_HOLDER_CORES = 0.05
"""Cores in use by a holder and its children above which it makes progress."""

NUM_STATES = 3
"""Readings of the state of a thread without which a wait is not uninterruptible."""

MAX_DESCRIPTOR = 1 << 20

FORK_LOCKS = (
    ("libgomp", "OpenMP"), ("libomp", "OpenMP"), ("libiomp", "OpenMP"), ("cv::", "OpenCV"),
    ("tokenizers", "tokenizers"), ("rayon", "tokenizers"),
)  # fmt: skip
"""Parts of native frames, and the library whose threads do not survive a fork."""


@dataclass(frozen=True)
class NamedWait:
    """A wait: frames by part of the path and function (empty: any), and what its words are made of."""

    name: str
    file: str
    functions: tuple[str, ...]
    cause: str  # with {path} and {holder}
    fix: str
    variables: tuple[str, ...] = ()  # local variables that hold the path
    suffix: str = ""  # of the path below the value of the variable
    lock: str = ""  # how its holder is found: `open` descriptor or `flock`
    children: str = ""  # part of the command of the processes that it waits for


TABLE = (
    NamedWait(
        "extension_lock", "torch/utils/file_baton.py", ("wait",),
        "it waits for the build lock of a torch extension, {path}; {holder}",
        "delete {path}: the build that made it was ended",
        variables=("build_directory",), suffix="lock", lock="open",
    ),
    NamedWait(
        "file_lock", "filelock/", ("acquire", "_poll_until_acquired"),
        "it waits for the file lock {path} of a cache; {holder}",
        "end the process that holds the lock, or let it finish; then delete {path} if it is left",
        variables=("lock_filename", "canonical_path"), lock="flock",
    ),
    NamedWait(
        "prompt", "/pdb.py", (), "it waits at a breakpoint for input from the terminal",
        "remove the breakpoint; on one rank it also stops those that wait for it",
    ),
    NamedWait(
        "prompt", "", ("<input>",), "it waits in input() for the terminal",
        "remove the call of input(), or read the answer on all ranks before training",
    ),
    NamedWait(
        "rendezvous", "torch/distributed/rendezvous.py", ("_create_c10d_store",),
        "it waits in the rendezvous for ranks that have not come",
        "start the missing ranks, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; "
        "`backlight attach --job PID` lists those of this machine",
    ),
    NamedWait(
        "rendezvous", "torch/distributed/elastic/rendezvous/", (),
        "it waits in the rendezvous of torchrun for nodes that have not come",
        "start the missing nodes, with the same --rdzv-endpoint and --nnodes",
    ),
    NamedWait(
        "group_creation", "torch/distributed/distributed_c10d.py",
        ("_new_process_group_helper", "_store_based_barrier", "new_group", "_new_group_with_tag"),
        "it waits for all ranks to create a process group",
        "call `new_group` on every rank, in the same order; `backlight attach --job PID` shows the others",
    ),
    NamedWait(
        "compile_workers", "torch/_inductor/", ("wait", "_wait_futures", "result"),
        "it waits for workers that compile; {holder}",
        "set TORCHINDUCTOR_COMPILE_THREADS=1, which compiles in the process itself",
        children="compile_worker",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class WaitCause:
    """What a process waits for, by a row of the table and the state of the system."""

    name: str
    words: str
    fix: str
    progresses: bool = False  # what it waits for computes


def find_named_wait(stack: ThreadStack) -> tuple[NamedWait, Frame] | None:
    """Return the row of the table that the innermost frames show."""
    frames = stack.frames[:DEPTH]
    if stack.called == "input" and frames:
        return next(row for row in TABLE if row.functions == ("<input>",)), frames[0]
    for frame in frames:
        file, function = frame.file.replace("\\", "/"), frame.function.rpartition(".")[2]
        for row in TABLE:
            if row.file and row.file in file and (not row.functions or function in row.functions):
                return row, frame
    return None


def variables_of(stack: ThreadStack) -> tuple[str, ...]:
    """Return the names of local variables that hold what a stack waits for."""
    found = find_named_wait(stack)
    return found[0].variables if found is not None else ()


def name_wait(pid: int, tid: int, stack: ThreadStack | None) -> WaitCause | None:
    """Return what a thread of a process waits for, None where neither its frames nor the kernel show it."""
    found = find_named_wait(stack) if stack is not None else None
    if stack is None or found is None:
        return _storage_wait(pid, tid) or _worker_wait(pid, stack)
    row, _ = found
    values = dict(reversed(stack.variables))  # the innermost counts
    path = next((Path(values[name]) / row.suffix for name in row.variables if name in values), None)
    holder, progresses = "", False
    if row.children:
        workers = [c for c in processes.children(pid) if _runs(c.pid, row.children)]
        progresses = bool(workers) and _compute([c.pid for c in workers])
        alive = [c for c in workers if not c.is_dead]
        holder = f"{len(alive)} of them live, and none computes" if alive else "none of them lives"
        if not workers and not progresses:
            return None  # it compiles in this process
    elif row.lock:
        holder, progresses = _describe_holder(path, row.lock)
    shown = str(path) if path is not None else "its path is not known"
    return WaitCause(
        row.name, row.cause.format(path=shown, holder=holder), row.fix.format(path=shown), progresses
    )


def _storage_wait(pid: int, tid: int) -> WaitCause | None:
    """Return the uninterruptible wait in which a thread stays for a while, None where it is in none."""
    for _ in range(NUM_STATES):
        thread = next((t for t in processes.read_threads(pid) if t.tid == tid), None)
        if thread is None or thread.state != "D":
            return None
        clock.sleep(HOLDER_WINDOW_S / NUM_STATES)
    call = processes.current_call(pid, tid)
    path = processes.open_file(pid, call[1]) if call is not None and call[1] < MAX_DESCRIPTOR else ""
    on = f" on {path}" if path.startswith("/") else ""
    return WaitCause(
        "storage",
        f"the kernel does not interrupt its wait{on} (state D), as for storage that does not answer",
        "check the file system of the checkpoints and data (`df`, `dmesg`); no signal ends this wait",
    )


def _worker_wait(pid: int, stack: ThreadStack | None) -> WaitCause | None:
    """Return why a worker of a DataLoader gives no batch: it is dead, or in a lock that it inherited."""
    if stack is None or not any("torch/utils/data/dataloader.py" in f.file for f in stack.frames[:DEPTH]):
        return None
    for worker in processes.children(pid):
        if worker.is_dead:
            how = processes.describe_exit(worker.exit_status)
            return WaitCause(
                "dead_worker",
                f"it waits for a worker of the data loader, {worker.pid}, which was {how}"
                if how.startswith("killed")
                else f"it waits for a worker of the data loader, {worker.pid}, which {how}",
                "read what the worker printed; killed by SIGKILL means out of memory: use fewer workers",
            )
        if processes.wait_reason(worker.pid, worker.pid) != "a lock" or _compute([worker.pid]):
            continue
        sample, _ = dump_by_py_spy(worker.pid, native=True)
        native = [f"{f.file} {f.function}" for t in (sample.threads if sample else ()) for f in t.native]
        library = next((words for part, words in FORK_LOCKS if any(part in f for f in native)), "")
        if library:
            return WaitCause(
                "inherited_lock",
                f"it waits for a worker of the data loader, {worker.pid}, which is in a lock of {library} "
                "that it inherited by fork",
                f"start workers with multiprocessing_context='spawn', or use one thread of {library} in them",
            )
    return None


def _describe_holder(path: Path | None, lock: str) -> tuple[str, bool]:
    find: Callable[[Path], list[int] | None] = {
        "open": processes.openers, "flock": processes.lock_holders,
    }[lock]  # fmt: skip
    holders = find(path) if path is not None else None
    if holders is None:
        return "whether a process holds it is not observable", False
    if not holders:
        return "no process of this machine holds it", False
    names = ", ".join(map(str, holders))
    if _compute(holders):
        return f"process {names} holds it, and computes", True
    return f"process {names} holds it, and does not compute", False


def _compute(pids: list[int]) -> bool:
    """Return whether processes or their descendants use a core."""
    before = _cpu_s(pids)
    clock.sleep(HOLDER_WINDOW_S)
    return _cpu_s(pids) - before > MIN_HOLDER_CORES * HOLDER_WINDOW_S


def _cpu_s(pids: list[int]) -> float:
    table = processes.read_process_table()
    wanted, size = set(pids), -1
    while size != len(wanted):
        size = len(wanted)
        wanted |= {p.pid for p in table.values() if p.parent in wanted}
    return sum(table[pid].cpu_s for pid in wanted if pid in table)


def _runs(pid: int, part: str) -> bool:
    return any(part in re.sub(r"\s", " ", argument) for argument in processes.command_line(pid))
