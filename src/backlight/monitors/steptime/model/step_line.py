"""One line of facts about where the time of a steady step goes, with the lines of code. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.monitors.steptime.model.evidence import (
    BusyLimits,
    core_wait,
    is_busy,
    measured_phases,
    newest_events,
    percent,
)
from backlight.monitors.steptime.model.machine import machine_words
from backlight.monitors.steptime.model.step_times import PhaseTimes
from backlight.records import Phase
from backlight.store.format.schema import SAMPLED_BATCH, SAMPLED_LINES
from backlight.store.read.run import Run
from backlight.text import duration, listed
from backlight.trace.step_limits import lower_share

REMAINDER = "between"
"""Phase of the time between the others, where forward and loss are not separated from it."""

COMPUTE = "compute"
WITHOUT_FORWARD = "backward and optimizer"
"""What is computing where the forward is in the remainder."""

ACTIVITIES: dict[str, frozenset[str]] = {
    "waiting for data": frozenset({Phase.DATA}),
    COMPUTE: frozenset({Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER}),
    "copies to the device": frozenset({Phase.HOST_TO_DEVICE}),
    "everything else": frozenset({Phase.OTHER, Phase.EVALUATION, Phase.CHECKPOINT}),
    "forward and everything else": frozenset({REMAINDER}),
}
"""What a step does, in the words of the line, and the phases that are it."""

LEAST_SHARE = 0.01
"""Share of a step below which an activity is not listed."""

PAUSE_SHARE = 0.05
"""Share of the run from which evaluation and saving are listed."""

NAMED_SHARE = 0.2
"""Share of a step from which an activity is listed with its line of code."""

LEAST_SAMPLES = 3
"""Samples at one line without which it is not named."""


@dataclass(frozen=True)
class SampledLine:
    """A line at which the training thread was seen in a phase, in ``samples`` of all.

    ``waits`` is for a batch, or for the device in the function of that name; else empty.
    """

    phase: str
    line: str
    function: str
    samples: int
    waits: str = ""

    @property
    def short(self) -> str:
        """The line without its folder, and its function: ``train.py:10 (Images.__getitem__)``."""
        name = self.line.replace("\\", "/").rpartition("/")[2]
        function = self.function.rpartition("<locals>.")[2]
        return name if function == "<module>" else f"{name} ({function})"


def sampled_lines(run: Run) -> list[SampledLine]:
    """Return the sampled lines of the newest attempt, of its lowest rank; empty where none were recorded."""
    events = newest_events(run, SAMPLED_LINES)
    lowest = min((event.rank for event in events), default=0)
    rows = [event.payload.get("lines") or [] for event in events if event.rank == lowest][-1:]
    return [
        SampledLine(str(p), str(at), str(name), int(n), *map(str, waits))
        for listed in rows for p, at, name, n, *waits in listed
    ]  # fmt: skip


def main_line(lines: Sequence[SampledLine], phases: frozenset[str]) -> SampledLine | None:
    """Return the line at which more than half of the samples of some phases were; None if none is.

    A call of ``backward`` or of an optimizer says nothing of what takes the time inside. What waits for a
    batch of any iterator is data, whatever its phase.
    """
    sampled = phases | {Phase.OTHER, Phase.LOSS} if REMAINDER in phases else phases
    of_phases = [
        line for line in lines
        if (Phase.DATA in phases if line.waits == SAMPLED_BATCH else line.phase in sampled)
    ]  # fmt: skip
    top = max(of_phases, key=lambda line: line.samples, default=None)
    if top is None or top.phase in {Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER}:
        return None
    is_main = 2 * top.samples > sum(line.samples for line in of_phases)
    return top if is_main and top.samples >= LEAST_SAMPLES else None


@dataclass(frozen=True)
class StepLine:
    """The line of facts; ``computing`` is the share of a step in which it computes, or may do so."""

    text: str
    computing: float


def step_line(run: Run) -> StepLine | None:
    """Return ``step 86 ms: 62 % waiting for data at train.py:10 (Images.__getitem__), 38 % compute``.

    Medians over the steady steps, or all but the first; None where there are too few of them.
    """
    limits = BusyLimits()
    table = measured_phases(run, limits)
    if table is None:
        return None
    lines = sampled_lines(run)
    shares = _shares(table, lines)
    parts = []
    for words, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share >= LEAST_SHARE:
            at = main_line(lines, ACTIVITIES[words]) if share >= NAMED_SHARE else None
            shown = WITHOUT_FORWARD if words == COMPUTE and REMAINDER in table.names else words
            parts.append(f"{percent(share)} {shown}" + ("" if at is None else f" at {at.short}"))
    text = f"step {duration(float(np.median(table.total)))}: {', '.join(parts)}"
    if pauses := _pauses(lines):
        text = f"{text}; of the run {listed(pauses)}"
    if machine := machine_words(run):
        text = f"{text}; {', '.join(machine)}"
    if (waited := core_wait(run)) is not None and is_busy(run, limits):
        text = f"{text}; the thread that trains waited for a core {percent(waited)} of the time"
    return StepLine(text, shares[COMPUTE] + shares["forward and everything else"])


def _pauses(lines: Sequence[SampledLine]) -> list[str]:
    """Return the share of the samples of the whole run in evaluation and in saving, each with its line."""
    samples = sum(line.samples for line in lines)
    parts = []
    for words, phase in (("evaluation", Phase.EVALUATION), ("saving", Phase.CHECKPOINT)):
        taken = sum(line.samples for line in lines if line.phase == phase)
        if taken >= LEAST_SAMPLES and taken >= PAUSE_SHARE * samples:
            at = main_line(lines, frozenset({phase}))
            parts.append(f"{percent(taken / samples)} {words}" + ("" if at is None else f" at {at.short}"))
    return parts


def _shares(table: PhaseTimes, lines: Sequence[SampledLine]) -> dict[str, float]:
    """Return the median share of a step of each activity; a pause of a few steps is in none of them."""
    waits = waits_for_batches(table, lines)
    iterators = table.phase(waits.phase) * waits.share
    seconds = {words: sum(table.phase(phase) for phase in phases) for words, phases in ACTIVITIES.items()}
    seconds["waiting for data"] = seconds["waiting for data"] + iterators
    rest = "forward and everything else" if waits.phase == REMAINDER else "everything else"
    seconds[rest] = seconds[rest] - iterators
    return {words: float(np.median(spent / table.total)) for words, spent in seconds.items()}


@dataclass(frozen=True)
class BatchWaits:
    """Share of what lies between the phases, here ``phase``, that waits for batches of iterators.

    ``low`` is the lower end of its interval: the share is one of samples. A DataLoader has its own phase.
    """

    phase: str
    share: float = 0.0
    low: float = 0.0


def waits_for_batches(table: PhaseTimes, lines: Sequence[SampledLine]) -> BatchWaits:
    """Return how much of the time between the phases waits for batches, by the samples of that time."""
    phase = REMAINDER if REMAINDER in table.names else Phase.OTHER
    between = [
        line for line in lines if line.phase in {Phase.OTHER, *([Phase.LOSS] if phase == REMAINDER else [])}
    ]
    part = sum(line.samples for line in between if line.waits == SAMPLED_BATCH)
    whole = sum(line.samples for line in between)
    return (
        BatchWaits(phase, part / whole, lower_share(part, whole))
        if part >= LEAST_SAMPLES
        else BatchWaits(phase)
    )
