"""Use of a device within a step: idle time by cause, and communication hidden by computation."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass

import numpy as np

from backlight.records import Phase
from backlight.trace.classification import MTIA, PHASES, RUNTIME, Kind
from backlight.trace.events import Mask
from backlight.trace.intervals import union
from backlight.trace.timeline import Step, Timeline

MAX_LAUNCH_GAP_NS = 20_000
"""A launched kernel that starts later on an idle device waited for something else."""

_EVENT_WAIT = re.compile(r"StreamWaitEvent|waitOnEvent")

_WAITING = re.compile(
    r"gloo:|\bwait\(\)|Work\.wait|c10d::.*wait|wait_tensor|cpu:.*all_?reduce", re.IGNORECASE
)


@dataclass(frozen=True)
class Idle:
    """Idle nanoseconds of a device by cause, which depends on the launch of the next kernel.

    Not launched yet: ``host_bound``, or the host had waited for the device (``synchronisation``), for a
    DataLoader (``data``) or a collective (``communication``). Launched already: a ``launch_gap`` of up to
    20 us, or ``queued``, if another device works meanwhile or the launch follows a wait for an event.
    ``unknown``: what it waited for, or its launch, is not in the trace. A launch that takes longer than that,
    such as the first of a kernel, whose code is loaded, has launched when it returns.
    """

    host_bound: int = 0
    synchronisation: int = 0
    data: int = 0
    communication: int = 0
    launch_gap: int = 0
    queued: int = 0
    unknown: int = 0

    @property
    def total(self) -> int:
        """Idle nanoseconds."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Overlap:
    """Nanoseconds in which a device computes, communicates, and does both.

    ``communication - overlapped`` is exposed: in that time nothing else ran on the device.
    """

    computation: int
    communication: int
    overlapped: int

    @property
    def exposed(self) -> int:
        """Communication that no computation hides."""
        return self.communication - self.overlapped


class Utilization:
    """Use of one device: why it idles, and what it does at the same time."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        device, tree, events = timeline.device, timeline.tree, timeline.events
        here = device.device == number
        self.busy = union(device.start[here], device.end[here])
        # Copies count as computation: during one the device does not merely wait for others.
        talks = device.of_kind(Kind.COMMUNICATION)[here]
        self._talk, self._work = (
            union(device.start[here][chosen], device.end[here][chosen]) for chosen in (talks, ~talks)
        )
        self._starts = device.start[here]
        self._elsewhere = union(device.start[~here], device.end[~here])
        self._event_waits = _follow_wait(timeline)[device.launch[here]]
        own_waits = events.among(MTIA) & events.where("name", lambda word: word == "event_wait")
        self._device_waits = union(
            events["start"][own_waits], events["start"][own_waits] + events["duration"][own_waits]
        )
        launch = device.launch[here]
        is_slow = (tree.end - tree.start > MAX_LAUNCH_GAP_NS) & ~timeline.waits
        moments = np.where(is_slow, tree.end, tree.start)
        self._launched = np.where(launch >= 0, moments[launch], -1) if len(tree.rows) else launch
        self._syncs = union(tree.start[timeline.waits], tree.end[timeline.waits])
        waiting = events.where("name", lambda word: bool(_WAITING.search(word))) & ~events.among(RUNTIME)
        self._waits = union(tree.start[waiting[tree.rows]], tree.end[waiting[tree.rows]])
        data = timeline.phases == PHASES.index(Phase.DATA)
        self._data = union(tree.start[data], tree.end[data])

    def overlap(self, step: Step) -> Overlap:
        """Return computation, communication and their overlap in one window."""
        talk, work = (intervals.within(step.start, step.end) for intervals in (self._talk, self._work))
        return Overlap(work.length, talk.length, int(work.covered(talk.start, talk.end).sum()))

    def idle(self, step: Step) -> Idle:
        """Return the idle time in one window, by cause."""
        gaps = self.busy.gaps(step.start, step.end)
        start, end = gaps.start, gaps.end
        if not len(start):
            return Idle()
        if not len(self._starts):
            return Idle(unknown=gaps.length)
        # The event that ends a gap starts where it ends; the last gap of a window may end without one.
        following = np.searchsorted(self._starts, end, side="left")
        last = np.minimum(following, len(self._starts) - 1)
        ended = (following < len(self._starts)) & (self._starts[last] == end)
        launched = np.where(following < len(self._starts), self._launched[last], step.end)
        unknown = (launched < 0) & ended
        late = np.where(unknown, start, np.clip(launched, start, end))
        late = np.where(~ended & (launched < 0), end, late)
        host, queued = late - start, end - late
        explained = self._event_waits[last] | (2 * self._elsewhere.covered(late, end) >= queued)
        explained |= 2 * self._device_waits.covered(late, end) >= queued
        unknown |= (queued > MAX_LAUNCH_GAP_NS) & ~explained
        data = self._data.covered(start, late)
        waits = np.minimum(self._waits.covered(start, late), host - data)
        rest = host - data - waits
        # A wait that was open when the device became idle kept the host from launching ahead.
        blocked = self._syncs.covered(start - 1, start + 1) > 0
        synchronised = np.where(blocked, rest, np.minimum(self._syncs.covered(start, late), rest))
        return Idle(
            host_bound=int((rest - synchronised).sum()),
            synchronisation=int(synchronised.sum()),
            data=int(data.sum()),
            communication=int(waits.sum()),
            launch_gap=int(queued[~unknown & (queued <= MAX_LAUNCH_GAP_NS)].sum()),
            queued=int(queued[~unknown & (queued > MAX_LAUNCH_GAP_NS)].sum()),
            unknown=int(queued[unknown].sum()),
        )


def _follow_wait(timeline: Timeline) -> Mask:
    """Return which calls launch work for a stream that has just been made to wait for an event.

    The wait comes after the thread's launch before it; bool [H + 1], the last one is for work without a
    launch.
    """
    tree, events = timeline.tree, timeline.events
    calls = np.flatnonzero(events.among(RUNTIME)[tree.rows])
    order, thread = np.arange(len(calls)), tree.thread[calls]
    is_wait = events.where("name", lambda word: bool(_EVENT_WAIT.search(word)))[tree.rows[calls]]
    is_launch = np.isin(calls, timeline.device.launch)
    waited = np.maximum.accumulate(np.where(is_wait, order, -1))
    launched = np.maximum.accumulate(np.where(is_launch, order, -1))
    before = np.maximum(np.append(-1, launched)[:-1], np.searchsorted(thread, thread) - 1)
    result = np.zeros(len(tree.rows) + 1, bool)
    result[calls[is_launch & (waited > before)]] = True
    return result
