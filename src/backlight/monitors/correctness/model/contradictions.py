"""Contradictions: facts of a training run that its author cannot have meant, as stored events. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from backlight.records import Evidence
from backlight.store.read.run import Event, Run

KIND = "contradiction"
"""Kind of the events; ``rule`` in the payload names the rule that reads them, the rest are facts."""


OBSERVED = "observed"
"""Kind of the event at the end of each process: ``steps`` in the payload is how many were observed."""

CLASSES = "classes"
"""Kind of the event that holds how many ``classes`` the loss compares, and by what ``factor`` the root of
backward is larger than the mean over targets. A root that is no multiple of one such loss leaves none."""

INPUT = "input"
"""Kind of the events that hold a ``digest`` of what the model was given at one of the first steps of a rank,
and the ``ranks`` that are to be given other data; empty where that is not known."""


def observed_steps(run: Run) -> int:
    """Return at how many steps facts were compared, in the process that observed most; 0 where unknown."""
    return max((int(event.payload.get("steps", 0)) for event in run.events(OBSERVED)), default=0)


def contradictions(run: Run, rule: str) -> list[Event]:
    """Return the contradictions that ``rule`` reads, in the order of their steps."""
    found = [event for event in run.events(KIND) if event.payload.get("rule") == rule]
    return sorted(found, key=lambda event: (event.step or 0, event.rank))


def steps_of(found: Sequence[Event]) -> list[int]:
    """Return the distinct steps of contradictions."""
    return sorted({event.step or 0 for event in found})


def evidence_of(found: Sequence[Event], value: float | str, unit: str = "1") -> Evidence:
    """Cite the first of several contradictions."""
    return Evidence(f"events/{KIND}", found[0].step, value, unit)


def observed(steps: Sequence[int]) -> str:
    """Write ``step 3`` or ``5 observed steps from step 3 on``."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} observed steps from step {steps[0]} on"
