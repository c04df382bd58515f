"""The phase clock of a step, and the events that only move it."""

from __future__ import annotations

from functools import partial

from backlight.capture.hub import HUB, Listener
from backlight.capture.phase_clock import PhaseClock
from backlight.records import Phase


class PhaseEvents(Listener):
    """A listener with the clock of the phases; what depends on more than it is for a subclass."""

    def __init__(self) -> None:
        self._clock = PhaseClock(partial(HUB.emit, "phase_changed"))

    def batch_missing(self) -> None:
        """Account for a wait that gave no batch."""
        self._clock.leave(Phase.DATA)

    def batch_raised(self, error: BaseException) -> None:
        """Account for a wait that failed."""
        self._clock.leave(Phase.DATA)

    def forward_end(self) -> None:
        """Account for what follows as the loss, if a backward comes."""
        if self._clock.inside(Phase.BACKWARD):
            return
        self._clock.leave(Phase.FORWARD if self._clock.inside(Phase.FORWARD) else Phase.EVALUATION)

    def norm_begin(self) -> None:
        """Account for the norm as a part of clipping."""
        self._clock.enter(Phase.CLIP)

    def norm_end(self) -> None:
        """End the time of the norm: clipping itself follows, or nothing of it."""
        self._clock.leave(Phase.CLIP)

    def clip_end(self) -> None:
        """End the time of clipping."""
        self._clock.leave(Phase.CLIP)
