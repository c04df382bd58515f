"""The phase that a training process is in, and the host time of each phase of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from backlight import clock
from backlight.capture.hub import HUB, Listener
from backlight.records import Phase


class PhaseClock:
    """The only state machine of phases: accounts time to the innermost open one, and reports each change.

    Phases nest as calls do (an optimizer's closure runs a forward and a backward): the inner one takes its
    time from the outer. What follows a forward is reported as loss at once, and accounted as loss only if a
    backward comes. ``separated`` is whether the open step has had a forward of its own; without one, forward
    and loss are in what lies between the other phases.
    """

    def __init__(self, on_change: Callable[[Phase], None] | None = None) -> None:
        self._on_change = on_change
        self._open: list[Phase] = []
        self._is_after_forward = False
        self._after_forward = 0.0
        self._times: defaultdict[str, float] = defaultdict(float)
        self._began = self._since = clock.perf_counter()
        self.phase = Phase.OTHER
        self.separated = False

    def enter(self, phase: Phase) -> None:
        """Open ``phase`` inside the one that is open."""
        self._account()
        if self._after_forward and phase is not Phase.FORWARD:
            self._settle(Phase.LOSS if phase is Phase.BACKWARD else self._enclosing())
        self._is_after_forward = False
        self._open.append(phase)
        self._change()

    def leave(self, phase: Phase) -> None:
        """Close ``phase`` and everything left open inside it; without effect where it is not open."""
        if phase not in self._open:
            return
        self._account()
        if self._after_forward and phase is not Phase.FORWARD:
            self._settle(self._enclosing())
        while self._open.pop() is not phase:
            pass
        self._is_after_forward = phase is Phase.FORWARD and phase not in self._open
        self.separated = self.separated or self._is_after_forward
        self._change()

    def restart(self) -> None:
        """Forget what was open: phases were not followed since."""
        self._open.clear()
        self._times.clear()
        self._is_after_forward, self._after_forward = False, 0.0
        self._began = self._since = clock.perf_counter()
        self.phase, self.separated = Phase.OTHER, False

    def seconds(self, phase: Phase) -> float:
        """Return what was accounted to ``phase`` since the last :meth:`take`."""
        return self._times.get(phase, 0.0)

    def inside(self, phase: Phase) -> bool:
        """Return whether ``phase`` is open."""
        return phase in self._open

    def take(self) -> tuple[dict[str, float], float]:
        """Return seconds by phase and in all since the last call, and begin anew.

        What no hook separates is not among the phases: it is the rest of the whole.
        """
        self._account()
        if self._after_forward:
            self._settle(self._enclosing())
        self._is_after_forward = False
        self._change()
        times, self._times = dict(self._times), defaultdict(float)
        times.pop(Phase.OTHER, None)
        seconds, self._began = self._since - self._began, self._since
        self.separated = False
        return times, seconds

    def _enclosing(self) -> Phase:
        return self._open[-1] if self._open else Phase.OTHER

    def _account(self) -> None:
        now = clock.perf_counter()
        if self._is_after_forward:
            self._after_forward += now - self._since
        else:
            self._times[self.phase] += now - self._since
        self._since = now

    def _settle(self, phase: Phase) -> None:
        """Account the time after forwards to ``phase``."""
        self._times[phase] += self._after_forward
        self._after_forward = 0.0

    def _change(self) -> None:
        within = self._open[-1] if self._open else Phase.OTHER
        phase = Phase.LOSS if self._is_after_forward else within
        if phase is not self.phase:
            self.phase = phase
            if self._on_change is not None:
                self._on_change(phase)


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
