"""Steps between two recorded ones, in which the hooks deliver no event: they count, and read no clock."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass

from backlight.records import Phase

PROGRESS, PHASE, STEPS, FORWARDS, BACKWARDS = 0, 1, 3, 4, 5
"""Positions in a board: a count that grows with every call, the number of the phase, and counts of calls."""

BOARD_LENGTH = 6

Board = MutableSequence[int] | memoryview

NUMBERS = {phase: number for number, phase in enumerate(Phase)}
"""Number of each phase in a board."""


@dataclass(slots=True)
class UnrecordedSteps:
    """Counts ``steps`` steps of ``optimizer``, an ``id``, each of which ends with its step.

    ``done`` are over, with ``backwards`` backward passes; ``open_backwards`` belong to the step in progress.
    ``board`` is where the hooks write what they do, for readers of other threads and processes. ``ended`` is
    called on the training thread when events are delivered again, after which no more is counted.
    """

    optimizer: int
    steps: int
    board: Board
    ended: Callable[[UnrecordedSteps], None]
    done: int = 0
    backwards: int = 0
    open_backwards: int = 0

    def end_step(self) -> bool:
        """Count a step; return whether it was the last one."""
        self.backwards += self.open_backwards
        self.open_backwards = 0
        self.done += 1
        return self.done >= self.steps
