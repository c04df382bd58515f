"""What `backlight attach` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.cli.console import Page
from backlight.text import count
from backlight.watchdog.observation import main_thread
from backlight.watchdog.stacks import format_sample, strip_backlight
from backlight.watchdog.words import span

if TYPE_CHECKING:
    from backlight.watchdog.attach import Attached, AttachedDumps, AttachedJob
    from backlight.watchdog.stacks import StackSample
    from backlight.watchdog.text import Diagnosis


FRAMES = 8
"""Frames of a stack without ``--full``, the most recent ones."""

ROWS = 10
"""Ranks, or groups of them, without ``--full``."""


def _begin(diagnosis: Diagnosis) -> Page:
    page = Page()
    page.sentence((diagnosis.claim, "bold"))
    page.sentence(f"confidence {diagnosis.confidence}; refuted if {diagnosis.refuted_if}")
    page.sentence(f"next: {diagnosis.next_check}")
    page.say()
    return page


def print_attached(found: Attached, *, full: bool = False) -> None:
    """Print the diagnosis of a process and the stack of its main thread; ``full`` adds all threads."""
    page = _begin(found.diagnosis)
    if full:
        for text in (found.threads, *map(format_sample, found.samples)):
            for line in text.split("\n"):
                page.sentence(line, indent=4)
    elif found.samples:
        _print_main_thread(found.samples[-1], found.pid, page)
    for what in found.unseen:
        page.sentence(f"not observable: {what}")
    if not full:
        page.say(("All threads and frames: --full.", "dim"))


def _print_main_thread(sample: StackSample, pid: int, page: Page) -> None:
    main = main_thread(sample, pid)
    if main is None:
        return
    frames = strip_backlight(main.frames)
    lines = [f"{frame.function} (C)" for frame in main.native if not frame.function.startswith("0x")][-3:]
    lines += [f"{frame.location} in {frame.qualified_name}" for frame in frames]
    page.say("main thread, most recent call first:")
    for line in lines[:FRAMES]:
        page.sentence(f"  {line}", indent=4)
    others = len(sample.threads) - 1
    rest = [
        count(len(lines) - FRAMES, "more frame") if len(lines) > FRAMES else "",
        count(others, "other thread") if others else "",
    ]
    if any(rest):
        page.say(("  and " + ", ".join(filter(None, rest)), "dim"))


def print_job(found: AttachedJob, *, full: bool = False) -> None:
    """Print the diagnosis of a job, and the ranks that have the same stack; without ``full`` some of them."""
    page = _begin(found.diagnosis)
    groups = found.groups if full else found.groups[: ROWS // 3]
    for group in groups:
        page.sentence(f"rank {span(group.ranks)}: {group.words}")
        for frame in group.frames if full else group.frames[:3]:
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
    if not full:
        _end(len(found.groups) - len(groups), "group of ranks", "groups of ranks", page)


def print_dumps(found: AttachedDumps, *, full: bool = False) -> None:
    """Print the diagnosis of dumps, and how far each rank has come; without ``full`` some of the ranks."""
    page = _begin(found.diagnosis)
    ranks = found.ranks if full else found.ranks[:ROWS]
    for one in ranks:
        step = "" if one.step is None else f", step {one.step}"
        state = f"waits in {one.pending}" if one.pending else "all completed"
        at = f", issued at {one.line}" if one.line else ""
        issued = f"{count(one.recorded, 'collective')}, last {one.last or 'none'}"
        page.sentence(f"rank {one.rank}{step}: {issued}; {state}{at}")
    for finding in found.findings:
        page.sentence(f"stored in the run: {finding.title}; {finding.detail}")
    if found.missing:
        page.sentence(f"not observable: rank {span(found.missing)} left no dump")
    if not full:
        _end(len(found.ranks) - len(ranks), "rank", "ranks", page)


def _end(left_out: int, one: str, several: str, page: Page) -> None:
    if left_out > 0:
        page.say((f"and {count(left_out, f'more {one}', f'more {several}')}: --full", "dim"))
