"""Tables of operators, kinds, phases and forward-backward pairs; shares add up to the device's busy time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import ENGINE, KINDS, MEMCPY, MEMSET, PHASES, Kind, kind_of
from backlight.trace.events import MISSING, Column, Integers
from backlight.trace.host_moments import OUTSIDE
from backlight.trace.intervals import shares
from backlight.trace.timeline import Step, Timeline

NO_OPERATOR = "(no operator)"
"""Name of time in no operator: Python and waiting on the host, device events without a known launch."""


@dataclass(frozen=True)
class Row:
    """One operator, kernel, kind or phase; ``phase`` and ``kind`` are empty where a row is over all.

    ``host`` nanoseconds leave out the operators called inside, and what another thread did while the thread
    of the steps was working, so that they add up to the steps. Of ``device`` nanoseconds a moment shared by
    several events counts once: computation goes before copies and copies before communication, so that rows
    add up to the union; ``busy`` is the sum of durations, of which ``shortest``, ``longest`` and the standard
    ``deviation`` are given as well. ``share`` is that of the device, or without one of
    the host.
    """

    name: str
    phase: str
    kind: str
    calls: int
    host: int
    device: int
    busy: int
    share: float
    shortest: int = 0
    longest: int = 0
    deviation: float = 0.0


class Costs:
    """Cost of every host event and device event in the chosen steps, in nanoseconds.

    ``inner`` is the part of the steps that the host was in each call of the tree, int64 [H], ``idle_host``
    the part in no call: they add up to ``host_total``, the length of the steps.
    """

    def __init__(self, timeline: Timeline, steps: list[Step]) -> None:
        self.timeline = timeline
        tree, device = timeline.tree, timeline.device
        self.step_indices = numbers = [timeline.steps.index(step) for step in steps]
        moments = timeline.moments
        owner, length = moments.call, moments.end - moments.start
        chosen = np.isin(moments.step, numbers)
        self.host_total = int(length[chosen].sum())
        chosen &= owner >= 0
        self.inner = np.bincount(owner[chosen], length[chosen], len(tree.rows)).astype(np.int64)
        self.idle_host = self.host_total - int(self.inner.sum())
        begun = np.isin(timeline.step_of(tree.start), numbers)
        self.host_rows = np.flatnonzero(begun | (self.inner > 0))
        launched = device.launch >= 0
        times = device.start.copy()
        if launched.any():
            times[launched] = tree.start[device.launch[launched]]
        self.device_rows = np.flatnonzero(np.isin(timeline.step_of(times), numbers))
        self.shares = self._shares(self.device_rows)
        self.durations = (device.end - device.start)[self.device_rows]
        self.on_device = bool(len(device.rows))
        self.device_total = int(self.shares.sum())

    def _shares(self, rows: Integers) -> Integers:
        device = self.timeline.device
        priority = np.zeros(len(rows), np.int64)
        copies = device.of_kind(Kind.HOST_COPY) | self.timeline.events.among(MEMCPY | MEMSET)[device.rows]
        priority[copies[rows]] = 1
        priority[device.of_kind(Kind.COMMUNICATION)[rows]] = 2
        result = np.zeros(len(rows), np.int64)
        for number in np.unique(device.device[rows]):
            here = np.flatnonzero(device.device[rows] == number)
            result[here] = shares(device.start[rows[here]], device.end[rows[here]], priority[here])
        return result

    def share(self, host: int, device: int) -> float:
        """Return the part of the device's time, or of the host's where there is no device."""
        part, total = (device, self.device_total) if self.on_device else (host, self.host_total)
        return part / total if total else 0.0

    def rows(
        self,
        host_key: Column,
        device_key: Column,
        label: Callable[[int], tuple[str, str, str]],
        counted: Column | None = None,
    ) -> list[Row]:
        """Return a row per key, the most expensive first.

        ``host_key`` is int64 like ``host_rows``, ``device_key`` like ``device_rows``, negative for no row;
        ``label`` names a key. Calls are those of ``counted`` host events, or else the device events.
        """
        size = int(max(host_key.max(initial=-1), device_key.max(initial=-1))) + 1
        has_row = host_key >= 0
        host, inner = host_key[has_row], self.inner[self.host_rows[has_row]]
        has_row = device_key >= 0
        device, shares, durations = (a[has_row] for a in (device_key, self.shares, self.durations))
        there = np.flatnonzero(np.bincount(host, minlength=size) + np.bincount(device, minlength=size))
        columns = (
            np.bincount(device if counted is None else host_key[counted], minlength=size),
            _sums(host, inner, size), _sums(device, shares, size), _sums(device, durations, size),
            *_spread(device, durations, size),
        )  # fmt: skip
        rows = [
            Row(*label(key), calls, host, part, busy, self.share(host, part), *spread)
            for key, calls, host, part, busy, *spread in zip(
                there.tolist(), *(column[there].tolist() for column in columns), strict=True
            )
        ]
        return sorted(rows, key=lambda row: (row.share, row.host), reverse=True)


def _spread(groups: Integers, values: Integers, count: int) -> tuple[Integers, Integers, Column]:
    """Return smallest, largest and standard deviation of the values of each group, 0 for an empty one."""
    low, high = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    size = np.maximum(np.bincount(groups, minlength=count), 1)
    middle = np.bincount(groups, values, count) / size
    deviation = np.sqrt(np.bincount(groups, (values - middle[groups]) ** 2, count) / size)
    return np.minimum(low, high), high, deviation


def _sums(groups: Integers, values: Integers, count: int) -> Integers:
    total = np.zeros(count, np.int64)
    np.add.at(total, groups, values)
    return total


def by_operator(costs: Costs) -> list[Row]:
    """Return operators by phase, the most expensive first.

    Time on the host that calls of the runtime take inside an operator is the operator's; time in no operator
    (annotations, Python, bare runtime calls) is in no row.
    """
    timeline = costs.timeline
    names, words = timeline.events["name"], timeline.events.words["name"]
    base = len(PHASES)

    def key(operator: Integers) -> Integers:
        is_inside = operator >= 0
        keys = np.full(len(operator), -1)
        keys[is_inside] = names[timeline.tree.rows[operator[is_inside]]].astype(np.int64) * base
        keys[is_inside] += timeline.phases[operator[is_inside]]
        return keys

    def label(code: int) -> tuple[str, str, str]:
        name = words[code // base]
        return name, PHASES[code % base].value, kind_of(name).value

    owner = timeline.operators[costs.host_rows]
    launcher = timeline.device.operator[costs.device_rows]
    rows = costs.rows(key(owner), key(launcher), label, counted=owner == costs.host_rows)
    lost = launcher < 0
    if lost.any():
        part, busy = int(costs.shares[lost].sum()), int(costs.durations[lost].sum())
        rows.append(Row(NO_OPERATOR, "", "", int(lost.sum()), 0, part, busy, costs.share(0, part)))
    return sorted(rows, key=lambda row: (row.share, row.host), reverse=True)


def by_kernel(costs: Costs) -> list[Row]:
    """Return device events by name, the most expensive first."""
    device, events = costs.timeline.device, costs.timeline.events
    base = len(KINDS)
    key = events["name"][device.rows].astype(np.int64) * base + device.kind

    def label(code: int) -> tuple[str, str, str]:
        return events.words["name"][code // base], "", KINDS[code % base].value

    return costs.rows(np.full(len(costs.host_rows), -1), key[costs.device_rows], label)


def by_kind(costs: Costs) -> list[Row]:
    """Return kinds of operation: device events, or on a trace without a device the operators' own time."""
    timeline = costs.timeline
    owner = timeline.operators[costs.host_rows]
    inside = owner >= 0
    kinds = np.full(len(owner), -1)
    kinds[inside] = timeline.kinds[timeline.events["name"][timeline.tree.rows[owner[inside]]]]
    counted = None if costs.on_device else owner == costs.host_rows

    def label(code: int) -> tuple[str, str, str]:
        return KINDS[code].value, "", KINDS[code].value

    return costs.rows(kinds, timeline.device.kind[costs.device_rows], label, counted)


def by_phase(costs: Costs) -> list[Row]:
    """Return phases, which fill the steps: host time in them, and device time that they launched."""
    timeline, here = costs.timeline, costs.host_rows

    def label(code: int) -> tuple[str, str, str]:
        return PHASES[code].value, PHASES[code].value, ""

    phases = timeline.device.phase[costs.device_rows]
    rows = costs.rows(timeline.phases[here], phases, label, counted=np.ones(len(here), bool))
    if costs.idle_host:
        share = costs.share(costs.idle_host, 0)
        rows.append(Row(OUTSIDE, "", "", 0, costs.idle_host, 0, 0, share))
    return sorted(rows, key=lambda row: (row.share, row.host), reverse=True)


@dataclass(frozen=True)
class Pair:
    """Operators of one name with their backward; times in nanoseconds, what they call included."""

    forward: str
    backward: str
    calls: int
    forward_host: int
    backward_host: int
    forward_device: int
    backward_device: int


def joined(costs: Costs) -> tuple[Integers, Integers]:
    """Return indices in the tree of joined forward and backward operators, int64 [J] each."""
    ahead, behind = costs.timeline.differentiated
    is_chosen = np.isin(behind, costs.host_rows)
    return ahead[is_chosen], behind[is_chosen]


def device_time(costs: Costs) -> Integers:
    """Return device time launched from the subtree of each index, in nanoseconds, int64 [H]."""
    tree, device = costs.timeline.tree, costs.timeline.device
    launch = device.launch[costs.device_rows]
    total = _sums(launch[launch >= 0], costs.shares[launch >= 0], len(tree.rows))
    for level in range(int(tree.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero(tree.depth == level)
        np.add.at(total, tree.parent[here], total[here])
    return total


def _nodes(timeline: Timeline, evaluated: Integers) -> Integers:
    """Return the node inside each of the engine's evaluations, without the sums of gradients around it."""
    tree, events = timeline.tree, timeline.events
    words = events.words["name"]
    codes = {word: code for code, word in enumerate(words)}
    bare = np.array([codes.get(word.removeprefix(ENGINE), MISSING) for word in words], dtype=np.int64)
    names = events["name"][tree.rows]
    # The node is the first call of its evaluation that has the node's name.
    is_node = (tree.parent >= 0) & (names == bare[names[tree.parent]]) & (names != names[tree.parent])
    node = np.arange(len(tree.rows))
    inside = np.flatnonzero(is_node)[::-1]
    node[tree.parent[inside]] = inside
    result: Integers = node[evaluated]
    return result


def pairs(costs: Costs, device: Integers) -> list[Pair]:
    """Return joined operators by name, the most expensive first; ``device`` is from :func:`device_time`."""
    timeline = costs.timeline
    tree, names = timeline.tree, timeline.events["name"]
    ahead, behind = joined(costs)
    behind = _nodes(timeline, behind)
    words = timeline.events.words["name"]
    key = names[tree.rows[ahead]].astype(np.int64) * len(words) + names[tree.rows[behind]]
    joined_pairs = []
    host = tree.end - tree.start
    for code in np.unique(key):
        here = key == code
        # Several nodes may belong to one forward, whose time counts once.
        once = np.unique(ahead[here])
        joined_pairs.append(
            Pair(
                words[int(code) // len(words)],
                words[int(code) % len(words)].removeprefix(ENGINE),
                int(here.sum()),
                int(host[once].sum()),
                int(host[behind[here]].sum()),
                int(device[once].sum()),
                int(device[behind[here]].sum()),
            )
        )
    return sorted(
        joined_pairs,
        key=lambda p: (p.forward_device + p.backward_device, p.forward_host + p.backward_host),
        reverse=True,
    )
