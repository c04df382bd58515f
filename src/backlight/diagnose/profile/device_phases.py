"""Device time between the boundaries of phases: events in the stream, read when the device has passed them.

Nothing waits inside a step: an event is put into the stream at each boundary, and the times between
events are read once the last event of a step has passed, at the end of a later step or of the script.
What lies between two events is the time of the stream, in which it worked or stood still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

from backlight.capture.hub import capturing_graph
from backlight.diagnose.profile.ranges import PhaseRanges
from backlight.records import Phase

WAITING = 64
"""Steps that may wait to be read; what is older than that is given up and counted."""


class Mark(Protocol):
    """What is used of :class:`torch.cuda.Event`."""

    def record(self) -> None:
        """Put the event into the current stream."""

    def query(self) -> bool:
        """Tell whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds from this event to a later one."""


def _event() -> Mark:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as torch has it


class DevicePhases(PhaseRanges):
    """Marks phases in the current stream.

    Parameters
    ----------
    make:
        Makes an event.

    Attributes
    ----------
    steps:
        Seconds by phase of each step that was read, in order.
    given_up:
        Steps whose events were not passed before too many others waited.
    """

    def __init__(self, make: Callable[[], Mark] = _event) -> None:
        super().__init__()
        self._make = make
        self._spare: list[Mark] = []
        self._marks: list[tuple[str, Mark]] = []
        self._waiting: deque[list[tuple[str, Mark]]] = deque()
        self.steps: list[dict[str, float]] = []
        self.given_up = 0

    def step_ends(self) -> None:
        """End the step: read what has passed, wait for nothing."""
        if not self._marks:
            self._mark()  # the first boundary of the first step
            return
        self._mark()
        self._waiting.append(self._marks)
        # The last event of this step is the first of the next.
        self._marks = [self._marks[-1]]
        while self._waiting and self._waiting[0][-1][1].query():
            self._read(self._waiting.popleft())
        while len(self._waiting) > WAITING:
            self.given_up += 1
            self._free(self._waiting.popleft())

    def finish(self) -> None:
        """Read the steps that are left; the training is over, and the device may be waited for."""
        while self._waiting:
            self._waiting[0][-1][1].synchronize()
            self._read(self._waiting.popleft())

    def _mark(self) -> None:
        if capturing_graph():
            return
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._marks.append((self._open[-1][0] if self._open else Phase.OTHER, event))

    def _read(self, marks: list[tuple[str, Mark]]) -> None:
        times: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(marks):
            times[phase] = times.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        self.steps.append(times)
        self._free(marks)

    def _free(self, marks: list[tuple[str, Mark]]) -> None:
        self._spare += [event for _, event in marks[:-1]]

    def _enter(self, phase: str) -> None:
        self._open.append((phase, None))
        if self._marks:
            self._mark()

    def _leave(self, phase: str) -> None:
        if self._inside(phase):
            while self._open.pop()[0] != phase:
                pass
            if self._marks:
                self._mark()

    def close(self) -> None:
        """Forget what is open."""
        self._open.clear()
