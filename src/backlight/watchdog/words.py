"""The sentences of a diagnosis, by what keeps a rank or a job from progress. No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence, Sized
from itertools import groupby
from typing import NamedTuple

from backlight.processes import ProcessEnd
from backlight.records import Phase
from backlight.watchdog.collectives import Awaited, Carried, CollectiveRecord, Reduction
from backlight.watchdog.diagnosis import What
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
    ForkLibrary.POLARS: ("polars", "read with another library"),
    ForkLibrary.ARROW: ("Arrow", "call pyarrow.set_cpu_count(1)"),
    ForkLibrary.OPENCV: ("OpenCV", "call cv2.setNumThreads(0)"),
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
        _LOADER + "which is in a lock{library} that it inherited by fork{worker_line}",
        "start workers with multiprocessing_context='spawn', or {without} in them",
    ),
    WaitName.LOCKED_WORKER: (
        _LOADER + "which waits for a lock{worker_line}",
        "find what took that lock and did not release it: take it by `with`, once per sample; one that was "
        "held when the worker was forked stays so in it, unless multiprocessing_context='spawn' starts it",
    ),
    WaitName.WORKER_STORAGE: (
        _LOADER + "whose own wait{on} the kernel does not interrupt (state D), as for storage that does not "
        "answer",
        _STORAGE_FIX,
    ),
    WaitName.BUSY_WORKER: (
        _LOADER + "which computes{worker_line}", "time the data loader alone; use more workers",
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
    library, without = _LIBRARIES[wait.library] if wait.library is not None else ("", "create what holds it")
    values = {
        "path": wait.path or "its path is not known", "on": f" on {wait.path}" if wait.path else "",
        "pids": pids, "holder": holder, "library": f" of {library}" if library else "",
        "worker_line": f" at {wait.line}" if wait.line else "", "without": without, "workers": workers,
        "stdin": f"a pipe{writers}" if wait.is_pipe else "the terminal",
        "end": "" if wait.end is None else was_text(wait.end),
        "ranks": f"; {on_their_way} computes" if on_their_way else "",
    }  # fmt: skip
    words, fix = _WAITS[wait.name]
    return words.format(**values), fix.format(**values)


STARVED = "it is slow: it waits for a core most of the time, so its stacks do not show what it does"
"""Why nothing follows from the stacks of a thread that hardly ran between them."""


class Words(NamedTuple):
    """Templates of claim, refutation and next check, of the values of :func:`_values`."""

    claim: str
    refuted_if: str
    next_check: str


_ONLY_SLOW = "it moves on by itself, so that what it waits for was only slow"
_LATER = "a longer observation decides"
_LONGER = "observe it for longer: --seconds 10"
_ATTACH = "look for what the hosts do: `backlight attach PID`"
_BATCHES = "compare the number of batches of the ranks"

WORDS = {
    What.ENDED: Words(
        "rank {rank} {end}{at_step}", "the process with that id still runs the script",
        "read the system log (dmesg) and the last lines that the rank printed",
    ),
    What.STOPPED: Words(
        "rank {rank} (process {pid}) is stopped by a signal or a debugger",
        "the state of process {pid} in /proc/{pid}/stat is not T", "continue it with `kill -CONT {pid}`",
    ),
    What.MOVES: Words("it moves{where}", "the step does not end", "attach again later"),
    What.NAMED_WAIT: Words(
        "rank {rank} makes no progress: {named}{after_at}; {seconds}", _ONLY_SLOW, "{fix}"
    ),
    What.SLOW_BACKWARD: Words(
        "{speed}", "no node finishes any more{unless}", "wait for the ETA; then {change}"
    ),
    What.IN_COLLECTIVE: Words(
        "rank {rank} waits in {call}{called_at}; {seconds}",
        "the call returns without another rank having done anything",
        "find out what the ranks do that are not in this call",
    ),
    What.SYNCHRONIZES: Words(
        "rank {rank} waits in {function}(){at} for {issued_call}; {seconds}",
        "that collective has completed, so that the wait is for something else",
        "find out what the ranks do that have not issued this collective",
    ),
    What.OUTSIDE_BACKWARD: Words(
        "step {step} does not reach backward: {outside}", "the step leaves {phase} by itself", "{look}"
    ),
    What.IDLE: Words(
        "{thread} {waits}{holds}{where_idle}; {tail}", _ONLY_SLOW, "find out what should end this wait{line}"
    ),
    What.REDUCES: Words(
        "{thread} waits in native code of backward, where it waits for {issued_call}{where_idle}; {tail}",
        _ONLY_SLOW, "find out what should end this wait{line}",
    ),
    What.SPINS: Words(
        "{thread} computes{inside}{holds}, without progress; {tail}", "the call at that line returns",
        "find out what ends the loop at {at_which}",
    ),
    What.LONG_CALL: Words(
        "one native call{inside} computes; {tail}", "a profile shows that the line is reached many times",
        "check the sizes of the operands at {at_which}",
    ),
    What.LONG_OPERATION: Words(
        "backward computes in {operation}; {tail}", "native stacks of two moments show different operations",
        "check the sizes of its inputs and the number of threads",
    ),
    **{
        what: Words(
            f"backward did not finish in the time given; {why}; {{tail}}", "a later sample decides",
            "take native stacks: install py-spy and allow tracing, or run `backlight attach PID`",
        )
        for what, why in {
            What.STARVED_OF_LOCK: "it is starved of the interpreter lock by other threads of the process",
            What.STARVED_OF_CORES: f"{STARVED}{{seen_at}}",
            What.PAUSES: "it neither waits nor computes without a pause",
            What.STACKS_DIFFER: "its stacks differ, or too few could be taken",
            What.PYTHON_OR_NATIVE: "whether it runs Python or native code is not known",
            What.WAITS_FOR_DEVICE: "the host waits; whether the device computes is not observable",
            What.ONE_OR_MANY_OPERATIONS: "native code computes; one long operation and many short ones are "
            "not distinguishable here{both_show}",
        }.items()
    },
    What.NO_STACKS: Words("no stacks could be taken; CPU {cpu}", _LATER, _LONGER),
    What.FEW_STACKS: Words(
        "too few stacks could be taken to see whether it moves{at}; CPU {cpu}", _LATER, _LONGER
    ),
    What.STACK_CHANGES: Words(
        "its stack changes between samples, so it moves{in_phase_now}{at}; CPU {cpu}",
        "no step has ended after a while", _LONGER,
    ),
    What.STARVED: Words(f"{STARVED}{{now_at}}; CPU {{cpu}}", _LATER, _LONGER),
    What.WAITS: Words(
        "{in_phase_}the main thread {waits}{holds}{at}; CPU {cpu}{workers}", "it moves on by itself",
        "find out what should end this wait{at_worker}",
    ),
    What.NATIVE_BACKWARD: Words(
        "backward computes in native code{now_in}; whether nodes finish is not observable from outside; "
        "CPU {cpu}", _LATER, _LONGER,
    ),
    What.COMPUTES: Words("it computes{holds}{at} in every sample{or_call}; CPU {cpu}", _LATER, _LONGER),
    What.LEFT_BY_ERROR: Words(
        "rank {ranks} has left its training{error}", "another rank has failed before",
        "read the traceback of that rank",
    ),
    What.TRAINING_ENDED: Words(
        "rank {ranks} has ended its training after step {step}", "that rank still takes part", _BATCHES
    ),
    What.TRAINING_FAILED: Words(
        "rank {ranks} has left its training with an error after step {step}", "that rank still takes part",
        _BATCHES,
    ),
    What.EXTRA_CALL: Words(
        "rank {rank} makes a call that rank {others}, which have ended, do not make",
        "the ranks that have ended have left a call out", "look for a call that only this rank makes",
    ),
    What.FAILED_TOGETHER: Words(
        "{running}which rank is the cause is undetermined", "a rank is observed to have left before",
        "read the tracebacks of the ranks in the order of their times",
    ),
    What.STRAGGLER: Words(
        "rank {ranks} {doing} and moves; it is a straggler, not hung", "that rank never enters the call",
        "compare the phases of that rank with those of the others",
    ),
    What.OTHER_CALL: Words(
        "rank {rank} waits in {bare_call}, the other {count} wait in {usual}",
        "the majority is at fault: a call that they all make by mistake",
        "look for a call that only this rank makes, or does not make",
    ),
    What.ALL_WAIT: Words(
        "all ranks wait, in calls that agree; which rank is the cause is undetermined",
        "one rank is observed in another call", "find out what the ranks do that are not in this call",
    ),
    What.OPEN_RECORDS: Words(
        "{num_ranks} of {count} recorded collectives have not completed, and no rank is missing in one; the "
        "first: rank {first_rank}, {call}", "they complete by themselves", _ATTACH,
    ),
    What.ALL_COMPLETED: Words(
        "all {count} recorded collectives of {num_ranks} ranks have completed, and the calls agree",
        "a dump was written before the hang", _ATTACH,
    ),
    What.NO_RANK_DIFFERS: Words(
        "no single rank differs from the others: {lines}", "a longer observation decides",
        "take the dumps of the flight recorder: `backlight attach --flight-recorder DIR`",
    ),
    What.JOB_MOVES: Words(
        "the job moves: the stacks of rank {span} change between samples", "no step has ended after a while",
        "attach again later",
    ),
    What.NOT_COME: Words(
        "ranks have not come to the rendezvous: {not_come}", "it moves on by itself", "{fix}"
    ),
}  # fmt: skip

OUTSIDE = {
    What.ENDED: Words(
        "process {pid} {has_ended}", "/proc/{pid}/stat shows another state", "look at its parent process"
    ),
    What.STOPPED: Words(
        "process {pid} is stopped by a signal or a debugger", "/proc/{pid}/stat shows another state",
        "continue it with `kill -CONT {pid}`",
    ),
    What.NAMED_WAIT: Words("{named}{at_line}", "it moves on by itself", "{fix}"),
}  # fmt: skip
"""Words for a process that is not watched, where they differ."""

HEADS = {What.SLOW_BACKWARD: "SLOW, not hung", What.OUTSIDE_BACKWARD: "PHASE {phase}"}
"""What stands before the colon, where that is not the kind."""

NAME_THEIR_RANK = {What.ENDED, What.STOPPED, What.NAMED_WAIT, What.IN_COLLECTIVE, What.SYNCHRONIZES}
