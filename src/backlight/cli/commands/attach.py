"""``backlight attach``: diagnose a running process, or dumps of the collectives of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from backlight.answer import Answer
from backlight.cli.app import command
from backlight.cli.console import print_answer
from backlight.cli.options import PATH, full_option, json_option
from backlight.text import count, visible

if TYPE_CHECKING:
    from backlight.watchdog.attach import Attached, AttachedDumps, AttachedJob
    from backlight.watchdog.stacks import Frame, StackSample, ThreadStack
    from backlight.watchdog.text import Diagnosis

FRAMES = 8
"""Frames of a stack without ``--full``, the most recent ones."""

COMMAND_CHARS = 200
"""Characters of the command line of a process that are shown."""

ROWS = 10
"""Ranks, or groups of them, without ``--full``."""


@command(
    "attach", "backlight attach 4711", "backlight attach 4711 --seconds 10 --no-native",
    "backlight attach --job 4711",
    "backlight attach --flight-recorder dumps/ --run runs/first",
)  # fmt: skip
@click.argument("pid", required=False, type=int, metavar="[PID]", help="Process id.")
@click.option(
    "--seconds", default=2.0, type=click.FloatRange(min=0.5), metavar="SECONDS", help="Observation time."
)
@click.option(
    "--native/--no-native", default=True, help="Take native stacks, which pauses the process briefly."
)
@click.option("--job", is_flag=True, help="All ranks of the job of PID on this machine, in one diagnosis.")
@click.option(
    "--flight-recorder", type=PATH, metavar="DIR", help="Dumps of torch's flight recorder, one file per rank."
)
@click.option("--run", type=PATH, metavar="RUN", help="Run of these dumps, for the steps of its ranks.")
@full_option
@json_option
def attach(
    *,
    pid: int | None,
    seconds: float,
    native: bool,
    job: bool,
    flight_recorder: Path | None,
    run: Path | None,
    full: bool,
    as_json: bool,
) -> None:
    """Diagnose a running process, a job, or flight recorder dumps.

    --job groups ranks by identical stack; --flight-recorder names the rank that skipped or changed a
    collective. --full prints all threads, Python and native.
    """
    if (pid is None) == (flight_recorder is None):
        raise ValueError("attach: expected either the PID of a process or --flight-recorder DIR")
    if run is not None and flight_recorder is None:
        raise ValueError("attach: --run goes with --flight-recorder DIR; a watched process has its run")
    # Before anything slow is imported: what a process does now is of use at once.
    is_shown = pid is not None and not job and not as_json and print_stacks(pid, full=full)

    from backlight.watchdog.attach import attach as observe
    from backlight.watchdog.attach import attach_dumps, attach_job

    if flight_recorder is not None:
        answer = dumps_answer(attach_dumps(flight_recorder, run), full=full)
    elif pid is not None and job:
        answer = job_answer(attach_job(pid, seconds), full=full)
    elif pid is not None:
        answer = process_answer(observe(pid, seconds, native=native), full=full, stacks=not is_shown)
    print_answer(answer, as_json=as_json, full=True)


def print_stacks(pid: int, *, full: bool = False) -> bool:
    """Print the Python stacks of a process as they are now; return whether they could be read."""
    from backlight import processes
    from backlight.terminal import write
    from backlight.watchdog.stacks import first_sample

    sample = first_sample(pid)
    if sample is None:
        return False
    command = " ".join(processes.command_line(pid))[:COMMAND_CHARS]
    lines = [f"process {pid}: {command}", *stack_lines(sample, pid, full=full), "observing ..."]
    write("\n".join(map(visible, lines)), flush=True)
    return True


def stack_lines(sample: StackSample, pid: int, *, full: bool = False) -> Iterator[str]:
    """Yield the stacks of a sample, most recent call first, each with its threads; the main thread is first.

    Without ``full`` it is the most recent frames.
    """
    from backlight import processes
    from backlight.user_code import is_user_code
    from backlight.watchdog.stacks import strip_backlight

    groups: dict[tuple[Frame, ...], list[ThreadStack]] = {}
    hidden = 0
    for thread in sorted(sample.threads, key=lambda thread: thread.tid != pid):
        frames = strip_backlight(thread.frames)
        if len(frames) < len(thread.frames) and not any(is_user_code(frame.file) for frame in frames):
            hidden += 1
        else:
            groups.setdefault(frames, []).append(thread)
    for frames, threads in groups.items():
        first = threads[0]
        wait = processes.wait_reason(pid, first.tid) if first.tid else ""
        state = "holds the interpreter lock" if first.holds_gil else wait and f"waits for {wait}"
        others = f" and {count(len(threads) - 1, 'other thread')}" if len(threads) > 1 else ""
        yield f"  {first.name or first.tid}{others}{state and f', {state}'}:"
        yield from (
            f"    {frame.location} in {frame.qualified_name}" for frame in frames[: None if full else FRAMES]
        )
        if not full and len(frames) > FRAMES:
            yield f"    and {count(len(frames) - FRAMES, 'more frame')}"
    if hidden:
        yield f"  and {count(hidden, 'thread')} of backlight"


def process_answer(attached: Attached, *, full: bool = False, stacks: bool = True) -> Answer:
    """Return the diagnosis of a process; ``full`` adds all threads, ``stacks`` that of the main thread."""
    from backlight.watchdog.stacks import format_sample

    lines: Iterable[str] = ()
    if full:
        lines = "\n".join((attached.threads, *map(format_sample, attached.samples))).split("\n")
    elif attached.samples and stacks:
        lines = _main_thread(attached.samples[-1], attached.pid)
    for worker in attached.workers:
        frames = worker.frames if full else worker.frames[:FRAMES]
        at = [f"  {frame.location} in {frame.qualified_name}" for frame in frames]
        lines = (*lines, f"worker {worker.pid} of the data loader, most recent call first:", *at)
    return _answer(
        attached.diagnosis, attached, lines, attached.unseen, "" if full else "all threads and frames: --full"
    )


def _main_thread(sample: StackSample, pid: int) -> Iterator[str]:
    from backlight.watchdog.observation import main_thread
    from backlight.watchdog.stacks import strip_backlight

    main = main_thread(sample, pid)
    if main is None:
        return
    lines = [f"{frame.function} (C)" for frame in main.native if not frame.function.startswith("0x")][-3:]
    lines += [f"{frame.location} in {frame.qualified_name}" for frame in strip_backlight(main.frames)]
    yield "main thread, most recent call first:"
    yield from (f"  {line}" for line in lines[:FRAMES])
    others = len(sample.threads) - 1
    rest = [
        count(len(lines) - FRAMES, "more frame") if len(lines) > FRAMES else "",
        count(others, "other thread") if others else "",
    ]
    if any(rest):
        yield "  and " + ", ".join(filter(None, rest))


def job_answer(attached: AttachedJob, *, full: bool = False) -> Answer:
    """Return the diagnosis of a job, and the ranks of each stack; without ``full`` some of them."""
    from backlight.watchdog.words import span

    groups = attached.groups if full else attached.groups[: ROWS // 3]
    lines = []
    for group in groups:
        lines.append(f"rank {span(group.ranks)}: {group.words}")
        frames = group.frames if full else group.frames[:3]
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]
    for problem in attached.nccl.problems if attached.nccl is not None else ():
        name = " ".join(filter(None, (problem.communicator, problem.status)))
        version = attached.nccl.version if attached.nccl else ""
        lines.append(f"NCCL {version} reports {name}: {' '.join(problem.lines)}")
    if attached.elsewhere:
        lines.append(f"not on this machine, or not started: rank {span(attached.elsewhere)}")
    left_out = _left_out(len(attached.groups) - len(groups), "group of ranks", "groups of ranks")
    return _answer(attached.diagnosis, attached, lines, attached.unseen, left_out)


def dumps_answer(attached: AttachedDumps, *, full: bool = False) -> Answer:
    """Return the diagnosis of dumps, and how far each rank has come; without ``full`` some of the ranks."""
    from backlight.watchdog.words import span

    ranks = attached.ranks if full else attached.ranks[:ROWS]
    lines = []
    for rank in ranks:
        step = "" if rank.step is None else f", step {rank.step}"
        state = f"waits in {rank.pending}" if rank.pending else "all completed"
        at = f", issued at {rank.line}" if rank.line else ""
        issued = f"{count(rank.recorded, 'collective')}, last {rank.last or 'none'}"
        lines.append(f"rank {rank.rank}{step}: {issued}; {state}{at}")
    lines += [f"stored in the run: {finding.title}; {finding.detail}" for finding in attached.findings]
    missing = [f"rank {span(attached.missing)} left no dump"] if attached.missing else []
    return _answer(
        attached.diagnosis, attached, lines, missing, _left_out(len(attached.ranks) - len(ranks), "rank")
    )


def _answer(
    diagnosis: Diagnosis, data: object, lines: Iterable[str], unseen: Iterable[str], left_out: str
) -> Answer:
    confidence = f"confidence {diagnosis.confidence}; refuted if {diagnosis.refuted_if}"
    notes = (*(f"not observable: {reason}" for reason in unseen), left_out)
    facts = (confidence, f"next: {diagnosis.next_check}", *lines)
    return Answer(diagnosis.claim, data, facts, notes=tuple(filter(None, notes)))


def _left_out(amount: int, singular: str, plural: str = "") -> str:
    plural = plural or f"{singular}s"
    return f"and {count(amount, f'more {singular}', f'more {plural}')}: --full" if amount > 0 else ""
