"""Launches and queues of the device: delays, queue lengths, time at a full queue, streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import KERNEL, RUNTIME
from backlight.trace.events import Integers
from backlight.trace.intervals import union
from backlight.trace.operators import Costs
from backlight.trace.timeline import Timeline

FULL_QUEUE = 1022
"""Launches that have not begun, from which a further one blocks: CUDA holds 1024, some of which run."""


@dataclass(frozen=True)
class TimeSpread:
    """Smallest, median, 95th percentile and largest of some values, in nanoseconds."""

    min: int
    median: int
    p95: int
    max: int

    @classmethod
    def of(cls, values: Integers) -> TimeSpread:
        """Return the spread of one or more values."""
        return cls(*(int(q) for q in np.quantile(values, (0.0, 0.5, 0.95, 1.0))))


@dataclass(frozen=True)
class Launches:
    """Launches of kernels by the name of the call.

    ``call`` is the duration of the call, ``delay`` the time from its end to the begin of the kernel, 0 where
    the kernel began inside it. ``short`` kernels took less time than their launch. A graph is one launch of
    many kernels, the first of which begins.
    """

    name: str
    calls: int
    call: TimeSpread
    delay: TimeSpread
    short: int


@dataclass(frozen=True)
class Stream:
    """One stream; ``busy`` is the union of its events in nanoseconds.

    The queue holds what was launched and has not begun: its length is ``mean`` over time and ``longest`` at
    most, and ``full`` nanoseconds are those with :data:`FULL_QUEUE` or more.
    """

    device: int
    stream: int
    events: int
    busy: int
    kinds: dict[str, int]
    mean: float
    longest: int
    full: int


def launches(costs: Costs) -> list[Launches]:
    """Return the launches of the chosen steps, the most frequent first."""
    timeline = costs.timeline
    device, events, tree = timeline.device, timeline.events, timeline.tree
    rows = costs.device_rows[device.launch[costs.device_rows] >= 0]
    rows = rows[events.among(KERNEL)[device.rows[rows]]]
    at = device.launch[rows]
    is_call = events.among(RUNTIME)[tree.rows[at]] if len(rows) else np.zeros(0, bool)
    rows, at = rows[is_call], at[is_call]
    spent = np.bincount(at, (device.end - device.start)[rows], len(tree.rows))
    at, first = np.unique(at, return_index=True)
    call = tree.end[at] - tree.start[at]
    delay = np.maximum(device.start[rows[first]] - tree.end[at], 0)
    short = spent[at] < call
    names = events["name"][tree.rows[at]]
    by_name = []
    for code in np.unique(names):
        here = names == code
        by_name.append(
            Launches(
                events.words["name"][int(code)], int(here.sum()),
                TimeSpread.of(call[here]), TimeSpread.of(delay[here]), int(short[here].sum()),
            )
        )  # fmt: skip
    return sorted(by_name, key=lambda launch: -launch.calls)


def queue_length(timeline: Timeline, rows: Integers) -> tuple[Integers, Integers]:
    """Return times and the length of the queue from each on, of the device events ``rows`` of one stream."""
    device, tree = timeline.device, timeline.tree
    rows = rows[device.launch[rows] >= 0]
    times = np.concatenate((tree.start[device.launch[rows]], device.start[rows]))
    change = np.concatenate((np.ones(len(rows), np.int64), np.full(len(rows), -1, np.int64)))
    # A launch counts before a begin at the same moment, so that no length is negative.
    order = np.lexsort((-change, times))
    return times[order], np.cumsum(change[order])


def by_stream(timeline: Timeline, chosen: Integers) -> list[tuple[int, int, Integers]]:
    """Return device, stream and device events of each stream, of those in ``chosen``."""
    numbers = timeline.device.device[chosen]
    streams = timeline.events["stream"][timeline.device.rows[chosen]]
    return [
        (number, stream, chosen[(numbers == number) & (streams == stream)])
        for number, stream in sorted(set(zip(numbers.tolist(), streams.tolist(), strict=True)))
    ]


def streams(costs: Costs) -> list[Stream]:
    """Return the streams of the chosen steps, the busiest first."""
    timeline = costs.timeline
    device, kinds = timeline.device, timeline.kind_names
    busiest = []
    for number, stream, rows in by_stream(timeline, costs.device_rows):
        start, end = device.start[rows], device.end[rows]
        spent = np.bincount(device.kind[rows], end - start, len(kinds)).astype(np.int64).tolist()
        by_kind = {name: time for name, time in zip(kinds, spent, strict=True) if time}
        times, length = queue_length(timeline, rows)
        lengths = np.diff(times)
        total = int(lengths.sum())
        busiest.append(
            Stream(
                number, stream, len(rows), union(start, end).length,
                dict(sorted(by_kind.items(), key=lambda item: -item[1])),
                float((length[:-1] * lengths).sum() / total) if total else 0.0,
                int(length.max(initial=0)), int(lengths[length[:-1] >= FULL_QUEUE].sum()),
            )
        )  # fmt: skip
    return sorted(busiest, key=lambda stream: -stream.busy)
