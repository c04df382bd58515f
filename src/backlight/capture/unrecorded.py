"""Steps between two recorded ones, in which the hooks deliver no event: they count, and read no clock.

What they pass on are the scalars of the step: loss, learning rates and gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.capture.step_summary import ScalarSink

PLAIN_STEPS = 3
"""Steps of one optimizer, with a backward and nothing else, after which unrecorded ones are only counted."""

COUNTED_STEP_S = 0.05
"""Seconds of a step up to which unrecorded ones are only counted: to observe a longer one costs little, and
locates what hangs in it."""

HEARTBEAT, PROGRESS, PHASE, PHASE_SINCE, STEPS, FORWARDS, BACKWARDS, LONGEST_OTHER, TYPICAL = range(9)
"""Positions in a board: the time of the last progress and a count that grows with it, the number of the phase
and the time of its begin, counts of calls, and the longest time between phases. The last, one per phase, is a
moving mean of its duration. Times are monotonic nanoseconds."""

BOARD_LENGTH = TYPICAL + len(Phase)

Board = MutableSequence[int] | memoryview

NUMBERS = {phase: number for number, phase in enumerate(Phase)}
"""Number of each phase in a board."""

_OTHER = NUMBERS[Phase.OTHER]


def write_phase(board: Board, phase: int, now: int) -> None:
    """Write on a board that a phase, by its number, begins or goes on ``now``."""
    before = board[PHASE]
    if phase != before:
        took, usual = now - board[PHASE_SINCE], board[TYPICAL + before]
        # A moving mean that a single stall cannot raise far.
        board[TYPICAL + before] = took if not usual else usual + (min(took, 4 * usual) - usual) // 10
        if before == _OTHER and took > board[LONGEST_OTHER]:
            board[LONGEST_OTHER] = took
        board[PHASE], board[PHASE_SINCE] = phase, now
    board[PROGRESS] += 1
    board[HEARTBEAT] = now


@dataclass(slots=True)
class UnrecordedSteps:
    """Counts ``steps`` steps from ``first`` on, each of which ends with the step of ``optimizer``, an ``id``.

    ``number`` is that of the optimizer among those of the run, ``scalars`` takes the scalars of each step.
    ``done`` are over. ``board`` is where the hooks write what they do, for readers of other threads and
    processes as well; ``closed`` is its count of backward passes at the end of the last step. ``may_nest`` is
    whether a step of the optimizer may call another of its own. ``ended`` is called on the training thread
    when events are delivered again, after which no more is counted.
    """

    optimizer: int
    number: int
    first: int
    steps: int
    scalars: ScalarSink
    board: Board
    ended: Callable[[UnrecordedSteps], None]
    may_nest: bool
    done: int = 0
    closed: int = field(init=False)
    _backwards: int = field(init=False)

    def __post_init__(self) -> None:
        self.closed = self._backwards = self.board[BACKWARDS]

    @property
    def backwards(self) -> int:
        """Backward passes so far."""
        return self.board[BACKWARDS] - self._backwards

    @property
    def open_backwards(self) -> int:
        """Backward passes of the step in progress."""
        return self.board[BACKWARDS] - self.closed

    def end_soon(self) -> None:
        """Count no step after the one in progress; from any thread."""
        self.steps = 0
