"""The critical path of a step: the chain of work and waiting that its length is made of.

The path is walked from the end of the step to its start. On the host it goes back to the last wait for the
device (a synchronisation, or a launch into a full queue), and from there to the device event that the wait
was for; on the device to the event that ended last before, or, where the launch came later than that end, to
the host. Every moment of the step is on the path exactly once. Unrecorded dependencies (events between
streams) are assumed to be on the event that ended last.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import KINDS, PHASES, RUNTIME
from backlight.trace.events import MISSING, Integers
from backlight.trace.host_moments import OUTSIDE
from backlight.trace.intervals import union
from backlight.trace.timeline import Device, Step, Timeline

BLOCKED_LAUNCH_NS = 50_000
"""A longer launch, on a device that is busy all the while, waits for a full queue."""

_QUEUEING = re.compile(r"Launch|Mem(cpy|set)\w*Async")


@dataclass(frozen=True)
class CriticalPath:
    """Nanoseconds on the path of one step: on the host by phase, on the device by kind of operation.

    ``launch`` is between a launch and the begin of its kernel, and between queued kernels,
    ``synchronisation`` between the end of a device event and the return of the call that waited for it.
    """

    host: dict[str, int]
    device: dict[str, int]
    launch: int
    synchronisation: int

    @property
    def total(self) -> int:
        """Nanoseconds of the step."""
        return sum(self.host.values()) + sum(self.device.values()) + self.launch + self.synchronisation


@dataclass(frozen=True)
class PathPart:
    """A part of a path: ``where`` is host, launch, device or wait; ``name`` is that of its device event."""

    where: str
    name: str
    start: int
    end: int


class Paths:
    """Walks the critical paths of a trace."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        device, tree, events = timeline.device, timeline.tree, timeline.events
        runtime = events.among(RUNTIME)
        queues = events.where("name", lambda word: bool(_QUEUEING.search(word)))
        indices = np.flatnonzero(timeline.waits | (runtime & queues)[tree.rows])
        # Where the queue is full a launch returns when the device has finished something.
        length = tree.end[indices] - tree.start[indices]
        busy = union(device.start, device.end).covered(tree.start[indices], tree.end[indices])
        blocked = (length >= BLOCKED_LAUNCH_NS) & (busy >= 0.95 * length)
        indices = indices[timeline.waits[indices] | blocked]
        indices = indices[np.argsort(tree.end[indices], kind="stable")]
        waits = tree.start[indices], tree.end[indices], _last(device, tree.end[indices])
        self._launch = device.launch.copy()
        launched = device.launch >= 0
        self._launch[launched] = tree.start[device.launch[launched]]
        before = _last(device, device.start)
        before[(before >= 0) & (self._launch > device.end[before])] = -1
        # Lists, because single numbers are read much faster from them than from arrays.
        self._before, self._end = before.tolist(), device.end.tolist()
        self._waits = tuple(column.tolist() for column in waits)
        moments = timeline.moments
        phases = np.append(timeline.phases, MISSING)[moments.call]
        self._phases = [
            (
                OUTSIDE if code < 0 else PHASES[code].value,
                union(moments.start[phases == code], moments.end[phases == code]),
            )
            for code in np.unique(phases).tolist()
        ]

    def of(self, step: Step) -> CriticalPath:
        """Return the path of one step by where its time went."""
        host: list[tuple[int, int]] = []
        on_device: list[int] = []
        launch = synchronisation = 0
        for begin, end, events, launched in self._legs(step):
            host.append((begin, end))
            on_device += events
            if events:
                synchronisation += begin - self._end[events[0]]
                launch += self._end[events[0]] - launched
        device, chosen = self._timeline.device, np.array(on_device, dtype=np.int64)
        spent = device.end[chosen] - np.maximum(device.start[chosen], step.start)
        by_kind = np.bincount(device.kind[chosen], spent, len(KINDS)).astype(np.int64)
        kinds = {KINDS[code].value: int(by_kind[code]) for code in np.argsort(-by_kind) if by_kind[code]}
        return CriticalPath(self._on_host(host), kinds, launch - int(spent.sum()), synchronisation)

    def parts(self, step: Step) -> list[PathPart]:
        """Return the parts of the path of one step by time; those without length are left out."""
        device, legs = self._timeline.device, []
        for begin, end, events, launched in self._legs(step):
            legs.append(PathPart("host", "host", begin, end))
            for event, ended in zip(events, [*(self._end[e] for e in events[1:]), launched], strict=False):
                name = self._timeline.name(int(device.rows[event]))
                if event == events[0]:
                    legs.append(PathPart("wait", name, self._end[event], begin))
                start = max(int(device.start[event]), step.start)
                legs += [
                    PathPart("device", name, start, self._end[event]),
                    PathPart("launch", name, ended, start),
                ]
        return [part for part in reversed(legs) if part.end > part.start]

    def _legs(self, step: Step) -> Iterator[tuple[int, int, list[int], int]]:
        """Yield the legs of the path from the end of the step: first on the host, then on the device.

        Given are begin and end on the host, the device events before, the last first, and when the host
        launched the first of them.
        """
        floor, time = step.start, step.end
        while time > floor:
            begin, event = self._wait(time, floor)
            events = []
            while event >= 0 and self._end[event] > floor:
                events.append(event)
                event = self._before[event]
            launched = floor
            if events:
                first = events[-1]
                launched = max(min(int(self._launch[first]), int(self._timeline.device.start[first])), floor)
            yield begin, time, events, launched
            time = launched

    def _wait(self, time: int, floor: int) -> tuple[int, int]:
        """Return when the last wait before ``time`` returned, and the event that it was for."""
        begins, ends, events = self._waits
        index = bisect_right(ends, time) - 1
        while index >= 0 and ends[index] > floor:
            # A wait that found the device idle delayed nothing.
            if events[index] >= 0 and self._end[events[index]] > max(begins[index], floor):
                return ends[index], events[index]
            index -= 1
        return floor, -1

    def _on_host(self, parts: list[tuple[int, int]]) -> dict[str, int]:
        """Return the time of the parts on the host by phase."""
        starts, ends = np.array(parts, dtype=np.int64).reshape(-1, 2).T
        spent = {name: int(taken.covered(starts, ends).sum()) for name, taken in self._phases}
        return {name: ns for name, ns in spent.items() if ns}


def _last(device: Device, times: Integers) -> Integers:
    """Return the device event that ended last before each of ``times`` and began earlier, -1 for none."""
    order = np.argsort(device.end, kind="stable")
    at = np.searchsorted(device.end[order], times, side="right") - 1
    by_end, start = np.append(order, -1), np.append(device.start, 0)
    while (late := (at >= 0) & (start[by_end[at]] >= times)).any():  # events without length
        at[late] -= 1
    result: Integers = by_end[at]
    return result
