"""What `backlight attach` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.monitors.stalls.model.attached_job import span
from backlight.monitors.stalls.model.emit import claim_of
from backlight.monitors.stalls.model.stacks import format_sample
from backlight.terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from backlight.monitors.stalls.model.attach import Attached
    from backlight.monitors.stalls.model.attached_dumps import AttachedDumps
    from backlight.monitors.stalls.model.attached_job import AttachedJob
    from backlight.monitors.stalls.model.observation import Diagnosis


def _print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    console.print(diagnosis.claim)
    console.print(f"confidence {diagnosis.confidence}; refuted if {diagnosis.refuted_if}")
    console.print(f"next: {diagnosis.next_check}\n")


def print_attached(found: Attached) -> None:
    """Print the diagnosis of a process, its threads and stacks."""
    console = make_console(soft_wrap=True)
    _print_diagnosis(console, found.diagnosis)
    console.print(found.threads)
    for sample in found.samples:
        console.print(format_sample(sample))
    for what in found.unseen:
        console.print(f"not observable: {what}")


def print_job(found: AttachedJob) -> None:
    """Print the diagnosis of a job, and the ranks that have the same stack."""
    console = make_console(soft_wrap=True)
    _print_diagnosis(console, found.diagnosis)
    for group in found.groups:
        console.print(f"rank {span(group.ranks)}: {group.words}")
        for frame in group.frames:
            console.print(f'  File "{frame.file}", line {frame.line} in {frame.function}')
    for problem in found.nccl.problems if found.nccl is not None else ():
        name = " ".join(filter(None, (problem.communicator, problem.status)))
        console.print(
            f"NCCL {found.nccl.version if found.nccl else ''} reports {name}: {' '.join(problem.lines)}"
        )
    if found.elsewhere:
        console.print(f"not on this machine, or not started: rank {span(found.elsewhere)}")
    for reason in found.unseen:
        console.print(f"not observable: {reason}")


def print_dumps(found: AttachedDumps) -> None:
    """Print the diagnosis of dumps, and how far each rank has come."""
    console = make_console(soft_wrap=True)
    _print_diagnosis(console, found.diagnosis)
    for one in found.ranks:
        step = "" if one.step is None else f", step {one.step}"
        state = f"waits in {one.pending}" if one.pending else "all completed"
        at = f", issued at {one.line}" if one.line else ""
        console.print(
            f"rank {one.rank}{step}: {one.recorded} collectives, last {one.last or 'none'}; {state}{at}"
        )
    for finding in found.findings:
        console.print(f"stored in the run: {claim_of(finding)}")
    if found.missing:
        console.print(f"not observable: rank {', '.join(map(str, found.missing))} left no dump")
