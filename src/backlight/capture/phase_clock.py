"""The phase that a training process is in, and the host time of each phase of a step."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from backlight import clock
from backlight.capture.hub import HUB, Listener
from backlight.capture.unrecorded import NUMBERS, PHASE, write_phase
from backlight.records import Phase

if TYPE_CHECKING:
    from torch import nn

_EVALUATION = NUMBERS[Phase.EVALUATION]


class PhaseClock:
    """The only state machine of phases: accounts time to the innermost open one, and reports each change.

    Phases nest as calls do (an optimizer's closure runs a forward and a backward): the inner one takes its
    time from the outer. What follows a forward is reported as loss at once, and accounted as loss only if a
    backward comes. ``separated`` is whether the step in progress has had a forward of its own; without one,
    forward and loss are in what lies between the other phases. ``open`` are the phases that are, innermost
    last.

    A change is written on the board of the hub, for readers of other threads and processes. There an
    evaluation goes on between its forwards, through data and all else.
    """

    def __init__(self) -> None:
        self.open: list[Phase] = []
        self._is_after_forward = False
        self._after_forward = 0
        self._times: defaultdict[str, int] = defaultdict(int)
        self._began = self._since = clock.monotonic_ns()
        self.phase = Phase.OTHER
        self.separated = False

    def enter(self, phase: Phase) -> None:
        """Open ``phase`` inside the one that is open."""
        enclosing = self.open[-1] if self.open else Phase.OTHER
        self.open.append(phase)
        goes_on = phase is Phase.FORWARD
        self._change(None if goes_on else Phase.LOSS if phase is Phase.BACKWARD else enclosing)

    def leave(self, phase: Phase) -> None:
        """Close ``phase`` and everything left open inside it; without effect where it is not open."""
        if phase not in self.open:
            return
        enclosing, is_forward = self.open[-1], phase is Phase.FORWARD
        while self.open.pop() is not phase:
            pass
        is_after_forward = is_forward and phase not in self.open
        self.separated = self.separated or is_after_forward
        self._change(None if is_forward else enclosing, is_after_forward=is_after_forward)

    def restart(self) -> None:
        """Forget what was open: phases were not followed since."""
        self.open.clear()
        self._times.clear()
        self._is_after_forward, self._after_forward = False, 0
        self._began = self._since = clock.monotonic_ns()
        self.phase, self.separated = Phase.OTHER, False

    def seconds(self, phase: Phase) -> float:
        """Return what was accounted to ``phase`` since the last :meth:`take`."""
        return self._times.get(phase, 0) / 1e9

    def take(self) -> tuple[dict[str, float], float]:
        """Return seconds by phase and in all since the last call, and begin anew.

        What no hook separates is not among the phases: it is the rest of the whole.
        """
        self._change(self.open[-1] if self.open else Phase.OTHER)
        self._times.pop(Phase.OTHER, None)
        times = {phase: taken / 1e9 for phase, taken in self._times.items()}
        self._times.clear()
        seconds, self._began = (self._since - self._began) / 1e9, self._since
        self.separated = False
        return times, seconds

    def _change(self, accounted: Phase | None, *, is_after_forward: bool = False) -> None:
        """Account for the time since the last change, and report the phase that begins.

        What came after forwards is accounted to the phase ``accounted``; None where that goes on.
        """
        now = clock.monotonic_ns()
        if self._is_after_forward:
            self._after_forward += now - self._since
        else:
            self._times[self.phase] += now - self._since
        self._since, self._is_after_forward = now, is_after_forward
        if self._after_forward and accounted is not None:
            self._times[accounted] += self._after_forward
            self._after_forward = 0
        phase = Phase.LOSS if is_after_forward else self.open[-1] if self.open else Phase.OTHER
        if phase is self.phase:
            return
        self.phase, board = phase, HUB.board
        goes_on = board[PHASE] == _EVALUATION and phase in {Phase.DATA, Phase.OTHER}
        write_phase(board, _EVALUATION if goes_on else NUMBERS[phase], now)
        if HUB.has_phase_listeners:
            HUB.emit("phase_changed", phase)


class PhaseEvents(Listener):
    """A listener with the clock of the phases; what depends on more than it is for a subclass."""

    def __init__(self) -> None:
        self._clock = PhaseClock()

    def batch_missing(self) -> None:
        """Account for a wait that gave no batch."""
        self._clock.leave(Phase.DATA)

    def batch_raised(self, error: BaseException) -> None:
        """Account for a wait that failed."""
        self._clock.leave(Phase.DATA)

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Account for what follows as the loss, if a backward comes."""
        if Phase.BACKWARD in self._clock.open:
            return
        self._clock.leave(Phase.FORWARD if Phase.FORWARD in self._clock.open else Phase.EVALUATION)

    def norm_begin(self) -> None:
        """Account for the norm as a part of clipping."""
        self._clock.enter(Phase.CLIP)

    def norm_end(self) -> None:
        """End the time of the norm: clipping itself follows, or nothing of it."""
        self._clock.leave(Phase.CLIP)

    def clip_end(self) -> None:
        """End the time of clipping."""
        self._clock.leave(Phase.CLIP)
