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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import KINDS, PHASES, RUNTIME
from backlight.trace.events import Integers
from backlight.trace.intervals import EMPTY, Union, union
from backlight.trace.timeline import Step, Timeline

BLOCKED_LAUNCH_NS = 50_000
"""A longer launch, on a device that is busy all the while, waits for a full queue."""

_QUEUEING = re.compile(r"Launch|Mem(cpy|set)\w*Async")


_MOST_SPECIFIC = (
    "backward", "optimizer", "clip", "data", "loss", "evaluation", "checkpoint", "host_to_device", "forward",
    "other",
)  # fmt: skip


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
class Part:
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
        self._waits = (tree.start[indices].tolist(), tree.end[indices].tolist())
        by_end = np.argsort(device.end, kind="stable")
        # Lists, because single numbers are read much faster from them than from arrays.
        self._by_end, self._ends = by_end.tolist(), device.end[by_end].tolist()
        self._start, self._end = device.start.tolist(), device.end.tolist()
        launch = (
            np.where(device.launch >= 0, tree.start[device.launch], -1) if len(tree.rows) else device.launch
        )
        self._launch = launch.tolist()
        # Inner phases overlap outer ones and other threads; the specific ones are counted first.
        self._phases: list[tuple[int, Union]] = []
        taken = EMPTY
        for code in map(PHASES.index, _MOST_SPECIFIC):
            chosen = timeline.phases == code
            starts = np.concatenate((taken.start, tree.start[chosen]))
            taken = union(starts, np.concatenate((taken.end, tree.end[chosen])))
            self._phases.append((code, taken))

    def of(self, step: Step) -> CriticalPath:
        """Return the path of one step by where its time went."""
        on_device: Counter[int] = Counter()
        host: list[tuple[int, int]] = []
        between = {"launch": 0, "wait": 0}
        for where, event, start, end in self._walk(step):
            if where == "host":
                host.append((start, end))
            elif where == "device":
                on_device[event] += end - start
            else:
                between[where] += end - start
        return self._sum(on_device, host, between["launch"], between["wait"])

    def parts(self, step: Step) -> list[Part]:
        """Return the parts of the path of one step by time; those without length are left out."""
        timeline = self._timeline
        return [
            Part(where, where if event < 0 else timeline.name(int(timeline.device.rows[event])), start, end)
            for where, event, start, end in reversed(list(self._walk(step)))
            if end > start
        ]

    def _walk(self, step: Step) -> Iterator[tuple[str, int, int, int]]:
        """Yield where, device event (-1 for none), start and end of each part, from the end of the step."""
        time, event = step.end, -1
        while time > step.start:
            if event < 0:
                wait, event = self._wait(time, step.start)
                if event < 0:
                    yield "host", -1, step.start, time
                    break
                end = min(self._end[event], wait)
                yield "host", -1, wait, time
                yield "wait", event, end, wait
                time = end
                continue
            begin = max(self._start[event], step.start)
            yield "device", event, begin, time
            time = begin
            before = self._before(time, event)
            ended = max(self._end[before], step.start) if before >= 0 else step.start
            launched = self._launch[event]
            if launched > ended or before < 0:
                launched = min(max(launched, step.start), time)
                yield "launch", event, launched, time
                time, event = launched, -1
            else:
                yield "launch", event, ended, time
                time, event = ended, before

    def _wait(self, time: int, floor: int) -> tuple[int, int]:
        """Return when the last wait before ``time`` returned, and the event that it was for."""
        begins, ends = self._waits
        index = bisect_right(ends, time) - 1
        while index >= 0 and ends[index] > floor:
            event = self._before(ends[index], -1)
            # A wait that found the device idle delayed nothing.
            if event >= 0 and self._end[event] > max(begins[index], floor):
                return ends[index], event
            index -= 1
        return floor, -1

    def _before(self, time: int, event: int) -> int:
        """Return the device event that ended last, not after ``time``; -1 for none."""
        index = bisect_right(self._ends, time) - 1
        while index >= 0 and (self._by_end[index] == event or self._start[self._by_end[index]] >= time):
            index -= 1
        return self._by_end[index] if index >= 0 else -1

    def _sum(
        self, on_device: Counter[int], host: list[tuple[int, int]], launch: int, synchronisation: int
    ) -> CriticalPath:
        timeline = self._timeline
        kinds: Counter[str] = Counter()
        for event, spent in on_device.items():
            kinds[KINDS[timeline.device.kind[event]].value] += spent
        starts: Integers = np.array([a for a, _ in host], dtype=np.int64)
        ends: Integers = np.array([b for _, b in host], dtype=np.int64)
        phases: dict[str, int] = {}
        done = 0
        for code, taken in self._phases:
            reached = int(taken.covered(starts, ends).sum())
            if reached > done:
                phases[PHASES[code].value] = reached - done
            done = reached
        outside = int((ends - starts).sum()) - done
        if outside:
            phases["outside any call"] = outside
        return CriticalPath(phases, dict(kinds.most_common()), launch, synchronisation)
