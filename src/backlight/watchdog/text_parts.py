"""Parts of the sentences of a diagnosis: ranks, calls, ends of processes, and waits with a name. No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence, Sized
from itertools import groupby

from backlight.processes import ProcessEnd
from backlight.records import Phase
from backlight.watchdog.collectives import Awaited, Carried, CollectiveRecord, Reduction
from backlight.watchdog.waits import ForkLibrary, WaitCause, WaitName


def join(numbers: Iterable[int]) -> str:
    """Return numbers in words: ``0, 2``."""
    return ", ".join(map(str, numbers))


def span(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``0-2, 5``."""
    runs = []
    for _, group in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(runs)


def in_phase(phase: Phase) -> str:
    """Return ``in backward``, or ``between phases``."""
    return "between phases" if phase is Phase.OTHER else f"in {phase}"


def call_text(call: Awaited | None) -> str:
    """Return a collective in words, with its phase, parameters and line where they are known."""
    if isinstance(call, CollectiveRecord):
        return call.text + issued_text(call)
    reduction = call if isinstance(call, Reduction) else Reduction()
    if reduction.carries is not None:
        return f"the reduction of {carried_text(reduction.carries)}"
    started = reduction.num_started
    of = f" (of {started} buckets of DDP that have all their gradients)" if started else ""
    return f"a reduction inside backward{of}"


def issued_text(call: CollectiveRecord) -> str:
    """Return where it was issued: ``, issued in backward for bucket 1 of 2 (a) at x:3``."""
    phase = f" in {call.phase}" if call.phase is not None else ""
    carried = f" for {carried_text(call.carries)}" if call.carries is not None else ""
    parts = f"{phase}{carried}{call.line and f' at {call.line}'}"
    return parts and f", issued{parts}"


def carried_text(carried: Carried) -> str:
    """Return the parameters that a collective carries."""
    several = f"{carried.first} ... {carried.last}, {carried.count} parameters"
    names = carried.first if carried.count == 1 else several
    if not carried.bucket:
        return f"the shards of {names}"
    return f"bucket {carried.bucket} of {carried.num_buckets} ({names})"


def verb(ranks: Sized) -> str:
    """Return the verb of these ranks."""
    return "waits" if len(ranks) == 1 else "wait"


def end_text(end: ProcessEnd) -> str:
    """Return in words how a process has ended."""
    if end.was_gone:
        return "is gone"
    if end.signal:
        try:
            how = f"killed by {signal.Signals(end.signal).name}"
        except ValueError:
            how = f"killed by signal {end.signal}"
    elif end.exit_code is not None:
        how = f"ended with exit code {end.exit_code}"
    else:
        how = "ended (how is not observable)"
    if end.for_memory:
        return f"{how}: the kernel killed it for memory"
    return f"{how}, while the kernel was killing for memory" if end.near_memory_kill else how


def was_text(end: ProcessEnd) -> str:
    """Return the same after ``which``: ``was killed by SIGKILL``."""
    return f"{'was ' if end.signal else ''}{end_text(end)}"


# Waits with a name

_STORAGE_FIX = "check the file system of the checkpoints and data (`df`, `dmesg`); no signal ends this wait"
_LOADER = "it waits for worker {pids} of the data loader, "
_LIBRARIES = {
    ForkLibrary.OPENMP: ("OpenMP", "call torch.set_num_threads(1)"),
    ForkLibrary.TOKENIZERS: ("tokenizers", "set TOKENIZERS_PARALLELISM=false"),
}
_WAITS = {
    WaitName.EXTENSION_LOCK: (
        "it waits for the build lock of a torch extension, {path}; {holder}",
        "delete {path}: the build that made it was ended",
    ),
    WaitName.FILE_LOCK: (
        "it waits for the file lock {path} of a cache; {holder}",
        "end the process that holds the lock, or let it finish; then delete {path} if it is left",
    ),
    WaitName.INPUT: (
        "it waits in input() for {stdin}",
        "remove the call of input(), or read the answer on all ranks before training",
    ),
    WaitName.BREAKPOINT: (
        "it waits at a breakpoint for input from the terminal",
        "remove the breakpoint; on one rank it also stops those that wait for it",
    ),
    WaitName.RENDEZVOUS: (
        "it waits in the rendezvous for ranks that have not come{ranks}",
        "start the missing ranks, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; "
        "`backlight attach --job PID` lists those of this machine",
    ),
    WaitName.NODE_RENDEZVOUS: (
        "it waits in the rendezvous of torchrun for nodes that have not come",
        "start the missing nodes, with the same --rdzv-endpoint and --nnodes",
    ),
    WaitName.GROUP_CREATION: (
        "it waits for all ranks to create a process group{ranks}",
        "call `new_group` on every rank, in the same order; `backlight attach --job PID` shows the others",
    ),
    WaitName.COMPILE_WORKERS: (
        "it waits for workers that compile; {workers}",
        "set TORCHINDUCTOR_COMPILE_THREADS=1, which compiles in the process itself",
    ),
    WaitName.DEAD_WORKER: (
        _LOADER + "which {end}", "read what the worker printed, and the log of the kernel (`dmesg`)",
    ),
    WaitName.KILLED_WORKER: (
        _LOADER + "which the kernel killed for memory",
        "use fewer workers, a smaller prefetch_factor or smaller items: they share one limit of memory",
    ),
    WaitName.INHERITED_LOCK: (
        _LOADER + "which is in a lock of {library} that it inherited by fork",
        "start workers with multiprocessing_context='spawn', or {without} in them",
    ),
    WaitName.WORKER_STORAGE: (
        _LOADER + "whose own wait{on} the kernel does not interrupt (state D), as for storage that does not "
        "answer",
        _STORAGE_FIX,
    ),
    WaitName.BUSY_WORKER: (
        _LOADER + "which computes", "time the data loader alone; use more workers",
    ),
    WaitName.STORAGE: (
        "the kernel does not interrupt its wait{on} (state D), as for storage that does not answer",
        _STORAGE_FIX,
    ),
}  # fmt: skip
"""What each wait is for, and its fix."""


def describe_wait(wait: WaitCause) -> tuple[str, str]:
    """Return in words what a process waits for, and the fix."""
    computes = "computes" if wait.progresses else "does not compute"
    pids = join(wait.pids or ())
    holder = f"process {pids} holds it, and {computes}"
    if not wait.pids:
        holder = "no process of this machine holds it"
        if wait.pids is None:
            holder = "whether a process holds it is not observable"
    writers = f" of process {pids}, which {computes}" if pids else ""
    none = "computes" if wait.progresses else "none of its processes computes"
    workers = f"process {pids} runs them, and {none}"
    if wait.end is not None:
        workers = f"none of them lives: process {pids} {was_text(wait.end)}"
    on_their_way = ", ".join(
        f"rank {rank} (process {pid})" for rank, pid in zip(wait.ranks, wait.pids or (), strict=False)
    )
    library, without = _LIBRARIES.get(wait.library, ("", "")) if wait.library is not None else ("", "")
    values = {
        "path": wait.path or "its path is not known", "on": f" on {wait.path}" if wait.path else "",
        "pids": pids, "holder": holder, "library": library, "without": without, "workers": workers,
        "stdin": f"a pipe{writers}" if wait.is_pipe else "the terminal",
        "end": "" if wait.end is None else was_text(wait.end),
        "ranks": f"; {on_their_way} computes" if on_their_way else "",
    }  # fmt: skip
    words, fix = _WAITS[wait.name]
    return words.format(**values), fix.format(**values)
