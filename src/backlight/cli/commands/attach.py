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
from backlight.text import count

if TYPE_CHECKING:
    from backlight.watchdog.attach import Attached, AttachedDumps, AttachedJob
    from backlight.watchdog.stacks import StackSample
    from backlight.watchdog.text import Diagnosis

FRAMES = 8
"""Frames of a stack without ``--full``, the most recent ones."""

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
    from backlight.watchdog.attach import attach as observe
    from backlight.watchdog.attach import attach_dumps, attach_job

    if (pid is None) == (flight_recorder is None):
        raise ValueError("attach: expected either the PID of a process or --flight-recorder DIR")
    if run is not None and flight_recorder is None:
        raise ValueError("attach: --run goes with --flight-recorder DIR; a watched process has its run")
    if flight_recorder is not None:
        answer = dumps_answer(attach_dumps(flight_recorder, run), full=full)
    elif pid is not None and job:
        answer = job_answer(attach_job(pid, seconds), full=full)
    elif pid is not None:
        answer = process_answer(observe(pid, seconds, native=native), full=full)
    print_answer(answer, as_json=as_json, full=True)


def process_answer(attached: Attached, *, full: bool = False) -> Answer:
    """Return the diagnosis of a process and the stack of its main thread; ``full`` adds all threads."""
    from backlight.watchdog.stacks import format_sample

    lines: Iterable[str] = ()
    if full:
        lines = "\n".join((attached.threads, *map(format_sample, attached.samples))).split("\n")
    elif attached.samples:
        lines = _main_thread(attached.samples[-1], attached.pid)
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
