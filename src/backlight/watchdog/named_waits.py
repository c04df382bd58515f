"""Waits that have a name: the frames that show each, what it waits for, and the fix. No torch.

One table. What the state of the system adds to a row is in `wait_causes.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from backlight.watchdog.stacks import Frame, ThreadStack

DEPTH = 12
"""Innermost frames in which a wait shows."""


LOADER = "torch/utils/data/dataloader.py"

BUSY_WORKER = "busy_worker"
"""Name of a wait for a worker of a data loader that computes."""

STORAGE_FIX = "check the file system of the checkpoints and data (`df`, `dmesg`); no signal ends this wait"


class Other(enum.Enum):
    """What the other side of a wait is, by which its processes are found."""

    NOTHING = enum.auto()
    OPENERS = enum.auto()  # of the path
    LOCK_HOLDERS = enum.auto()  # of the path
    WRITERS = enum.auto()  # of standard input
    RANKS = enum.auto()  # of the job that are elsewhere
    COMPILE_WORKERS = enum.auto()
    LOADER_WORKERS = enum.auto()


@dataclass(frozen=True)
class NamedWait:
    """A wait: frames by part of the path and function (empty: any), and what its words are made of."""

    name: str
    file: str
    functions: tuple[str, ...]
    cause: str  # with {path}, {holder}, {how} and {library}
    fix: str
    variables: tuple[str, ...] = ()  # local variables that hold the path
    suffix: str = ""  # of the path below the value of the variable
    other: Other = Other.NOTHING


TABLE = (
    NamedWait(
        "extension_lock", "torch/utils/file_baton.py", ("wait",),
        "it waits for the build lock of a torch extension, {path}; {holder}",
        "delete {path}: the build that made it was ended",
        variables=("build_directory",), suffix="lock", other=Other.OPENERS,
    ),
    NamedWait(
        "file_lock", "filelock/", ("acquire", "_poll_until_acquired"),
        "it waits for the file lock {path} of a cache; {holder}",
        "end the process that holds the lock, or let it finish; then delete {path} if it is left",
        variables=("lock_filename", "canonical_path"), other=Other.LOCK_HOLDERS,
    ),
    NamedWait(
        "prompt", "", ("<input>",), "it waits in input() for {holder}",
        "remove the call of input(), or read the answer on all ranks before training",
        other=Other.WRITERS,
    ),
    NamedWait(
        "prompt", "/pdb.py", (), "it waits at a breakpoint for input from the terminal",
        "remove the breakpoint; on one rank it also stops those that wait for it",
    ),
    NamedWait(
        "rendezvous", "torch/distributed/rendezvous.py", ("_create_c10d_store",),
        "it waits in the rendezvous for ranks that have not come",
        "start the missing ranks, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; "
        "`backlight attach --job PID` lists those of this machine",
        other=Other.RANKS,
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
        other=Other.RANKS,
    ),
    NamedWait(
        "compile_workers", "torch/_inductor/", ("wait", "_wait_futures", "result"),
        "it waits for workers that compile; {holder}",
        "set TORCHINDUCTOR_COMPILE_THREADS=1, which compiles in the process itself",
        other=Other.COMPILE_WORKERS,
    ),
    # One row for each state of the worker; the frames are the same.
    NamedWait(
        "dead_worker", LOADER, (), "it waits for worker {holder} of the data loader, which {how}",
        "read what the worker printed, and the log of the kernel (`dmesg`)",
        other=Other.LOADER_WORKERS,
    ),
    NamedWait(
        "killed_worker", LOADER, (),
        "it waits for worker {holder} of the data loader, which the kernel killed for memory",
        "use fewer workers, a smaller prefetch_factor or smaller items: they share one limit of memory",
        other=Other.LOADER_WORKERS,
    ),
    NamedWait(
        "inherited_lock", LOADER, (),
        "it waits for worker {holder} of the data loader, which is in a lock of {library} that it inherited "
        "by fork",
        "start workers with multiprocessing_context='spawn', or {how} in them",
        other=Other.LOADER_WORKERS,
    ),
    NamedWait(
        "worker_storage", LOADER, (),
        "it waits for worker {holder} of the data loader, whose own wait{path} the kernel does not interrupt "
        "(state D), as for storage that does not answer",
        STORAGE_FIX, other=Other.LOADER_WORKERS,
    ),
    NamedWait(
        BUSY_WORKER, LOADER, (), "it waits for worker {holder} of the data loader, which computes",
        "time the data loader alone; use more workers", other=Other.LOADER_WORKERS,
    ),
    NamedWait(
        "storage", "", ("<state D>",),
        "the kernel does not interrupt its wait{path} (state D), as for storage that does not answer",
        STORAGE_FIX,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class WaitCause:
    """What a process waits for, by a row of the table and the state of the system."""

    name: str
    words: str
    fix: str
    progresses: bool = False  # what it waits for computes


def row_of(name: str) -> NamedWait:
    """Return the first row of the table with this name."""
    return next(row for row in TABLE if row.name == name)


def find_named_wait(stack: ThreadStack) -> tuple[NamedWait, Frame] | None:
    """Return the row of the table that the innermost frames show."""
    frames = stack.frames[:DEPTH]
    if stack.called == "input" and frames:
        return row_of("prompt"), frames[0]
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
