"""What `backlight attach` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.cli.console import Page
from backlight.monitors.stalls.model.attached_job import span
from backlight.monitors.stalls.model.emit import claim_of
from backlight.monitors.stalls.model.stacks import format_sample
from backlight.text import count

if TYPE_CHECKING:
    from backlight.monitors.stalls.model.attach import Attached
    from backlight.monitors.stalls.model.attached_dumps import AttachedDumps
    from backlight.monitors.stalls.model.attached_job import AttachedJob
    from backlight.monitors.stalls.model.observation import Diagnosis


def _begin(diagnosis: Diagnosis) -> Page:
    page = Page()
    page.sentence((diagnosis.claim, "bold"))
    page.sentence(f"confidence {diagnosis.confidence}; refuted if {diagnosis.refuted_if}")
    page.sentence(f"next: {diagnosis.next_check}")
    page.say()
    return page


def print_attached(found: Attached) -> None:
    """Print the diagnosis of a process, its threads and stacks."""
    page = _begin(found.diagnosis)
    for text in (found.threads, *map(format_sample, found.samples)):
        for line in text.split("\n"):
            page.sentence(line, indent=4)
    for what in found.unseen:
        page.sentence(f"not observable: {what}")


def print_job(found: AttachedJob) -> None:
    """Print the diagnosis of a job, and the ranks that have the same stack."""
    page = _begin(found.diagnosis)
    for group in found.groups:
        page.sentence(f"rank {span(group.ranks)}: {group.words}")
        for frame in group.frames:
            page.sentence(f'  File "{frame.file}", line {frame.line} in {frame.function}', indent=4)
    for problem in found.nccl.problems if found.nccl is not None else ():
        name = " ".join(filter(None, (problem.communicator, problem.status)))
        page.sentence(
            f"NCCL {found.nccl.version if found.nccl else ''} reports {name}: {' '.join(problem.lines)}"
        )
    if found.elsewhere:
        page.sentence(f"not on this machine, or not started: rank {span(found.elsewhere)}")
    for reason in found.unseen:
        page.sentence(f"not observable: {reason}")


def print_dumps(found: AttachedDumps) -> None:
    """Print the diagnosis of dumps, and how far each rank has come."""
    page = _begin(found.diagnosis)
    for one in found.ranks:
        step = "" if one.step is None else f", step {one.step}"
        state = f"waits in {one.pending}" if one.pending else "all completed"
        at = f", issued at {one.line}" if one.line else ""
        issued = f"{count(one.recorded, 'collective')}, last {one.last or 'none'}"
        page.sentence(f"rank {one.rank}{step}: {issued}; {state}{at}")
    for finding in found.findings:
        page.sentence(f"stored in the run: {claim_of(finding)}")
    if found.missing:
        page.sentence(f"not observable: rank {', '.join(map(str, found.missing))} left no dump")
