"""Host time per phase of a step: every moment belongs to one phase, so the phases add up to the step."""

from __future__ import annotations

import time

from backlight.records import Phase

_AFTER = "after forward"
"""What follows a forward is loss only if a backward comes; until then it is kept apart."""


class PhaseClock:
    """Accounts time to the innermost phase that is open; reads a clock and nothing else.

    Phases nest as calls do (an optimizer's closure runs a forward and a backward): the inner one takes
    its time from the outer.

    Attributes
    ----------
    separated:
        Whether the open step has had a forward of its own; without one, forward and loss are in
        what lies between the other phases.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._rest: str = Phase.OTHER
        self._since = time.perf_counter()
        self._began = self._since
        self._times: dict[str, float] = {}
        self.separated = False

    def enter(self, phase: Phase) -> None:
        """Open ``phase`` inside the one that is open."""
        self._account()
        if phase is Phase.BACKWARD:
            self._settle(Phase.LOSS)
        elif phase is not Phase.FORWARD:
            self._settle(Phase.OTHER)
        self._open.append(phase)

    def leave(self, phase: Phase) -> None:
        """Close ``phase`` and what was left open inside it; one that is not open is let be."""
        if phase not in self._open:
            return
        self._account()
        while self._open.pop() != phase:
            pass
        if phase is Phase.FORWARD:
            self.separated = True
            self._rest = _AFTER

    def inside(self, phase: Phase) -> bool:
        """Return whether ``phase`` is open."""
        return phase in self._open

    def take(self) -> tuple[dict[str, float], float]:
        """Return seconds by phase and in all since the last call, and begin anew.

        What no hook separates is not among the phases: it is the rest of the whole.
        """
        self._account()
        self._settle(Phase.OTHER)
        times, self._times = self._times, {}
        seconds = self._since - self._began
        self._began = self._since
        self.separated = False
        times.pop(Phase.OTHER, None)
        return times, seconds

    def _account(self) -> None:
        now = time.perf_counter()
        phase = self._open[-1] if self._open else self._rest
        self._times[phase] = self._times.get(phase, 0.0) + now - self._since
        self._since = now

    def _settle(self, phase: Phase) -> None:
        after = self._times.pop(_AFTER, None)
        if after is not None:
            self._times[phase] = self._times.get(phase, 0.0) + after
        self._rest = Phase.OTHER
