"""Device time of each phase, from events in the stream.

Nothing waits inside a step: an event is recorded at each boundary of phases, and the times between events are
read once the device has passed the last event of a step, at the end of a later step or of the script. The
time between two events includes idle time of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

from backlight.capture.hub import Listener
from backlight.devices import is_capturing_graph, timing_event
from backlight.records import Phase

MAX_PENDING_STEPS = 64
"""Steps that may wait to be read; older ones are dropped and counted."""


class DeviceEvent(Protocol):
    """The used part of :class:`torch.Event`."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds from this event to a later one."""


class DevicePhases(Listener):
    """Marks phases in the current stream; ``make`` creates an event.

    ``steps`` are seconds by phase of each step, in order; ``dropped_steps`` counts steps whose events were
    not passed before too many others were pending.
    """

    def __init__(self, make: Callable[[], DeviceEvent] = timing_event) -> None:
        self._make = make
        self._phase = Phase.OTHER
        self._spare: list[DeviceEvent] = []
        self._marks: list[tuple[str, DeviceEvent]] = []
        self._pending: deque[list[tuple[str, DeviceEvent]]] = deque()
        self.steps: list[dict[str, float]] = []
        self.dropped_steps = 0

    def phase_changed(self, phase: Phase) -> None:
        """Mark the boundary, from the end of the first step on."""
        self._phase = phase
        if self._marks:
            self._mark()

    def end_step(self) -> None:
        """End the step: read the steps that have passed, without waiting."""
        if not self._marks:
            self._mark()  # the first boundary of the first step
            return
        self._mark()
        self._pending.append(self._marks)
        # The last event of this step is the first of the next.
        self._marks = [self._marks[-1]]
        while self._pending and self._pending[0][-1][1].query():
            self._read(self._pending.popleft())
        while len(self._pending) > MAX_PENDING_STEPS:
            self.dropped_steps += 1
            self._free(self._pending.popleft())

    def finish(self) -> None:
        """Read the remaining steps; the steps are over, so that waiting for the device is allowed."""
        while self._pending:
            self._pending[0][-1][1].synchronize()
            self._read(self._pending.popleft())

    def _mark(self) -> None:
        if is_capturing_graph():
            return
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._marks.append((self._phase, event))

    def _read(self, marks: list[tuple[str, DeviceEvent]]) -> None:
        times: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(marks):
            times[phase] = times.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        self.steps.append(times)
        self._free(marks)

    def _free(self, marks: list[tuple[str, DeviceEvent]]) -> None:
        self._spare += [event for _, event in marks[:-1]]
