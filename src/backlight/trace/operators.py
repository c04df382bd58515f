"""Tables of operators, kinds, phases and forward-backward pairs; shares add up to the device's busy time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import ENGINE, KINDS, MEMCPY, MEMSET, OPERATOR, PHASES, Kind, kind_of
from backlight.trace.events import Column, Integers
from backlight.trace.intervals import shares
from backlight.trace.timeline import Step, Timeline, Tree

NO_OPERATOR = "(no operator)"
"""Name of time in no operator: Python and waiting on the host, device events without a known launch."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes
    ----------
    name:
        Operator, kernel, kind or phase.
    phase:
        Phase it ran in, empty where rows are over all phases.
    kind:
        Kind of operation, empty where rows are over all kinds.
    calls:
        Calls of the operator, or device events.
    host:
        Nanoseconds on the host, without the operators called inside.
    device:
        Nanoseconds of the device. A moment shared by several events counts once: computation goes before
        copies and copies before communication, so that rows add up to the union.
    busy:
        Sum of the durations of the device events; more than ``device`` where they overlap.
    share:
        Part of the device's busy time; where there is no device, of the host's.
    """

    name: str
    phase: str
    kind: str
    calls: int
    host: int
    device: int
    busy: int
    share: float


class Costs:
    """Cost of every host event and device event in the chosen steps, in nanoseconds."""

    def __init__(self, timeline: Timeline, steps: list[Step]) -> None:
        self.timeline = timeline
        tree, device = timeline.tree, timeline.device
        numbers = [timeline.steps.index(step) for step in steps]
        self.host_rows = np.flatnonzero(np.isin(timeline.step_of(tree.start), numbers))
        launched = device.launch >= 0
        moments = device.start.copy()
        if launched.any():
            moments[launched] = tree.start[device.launch[launched]]
        self.device_rows = np.flatnonzero(np.isin(timeline.step_of(moments), numbers))
        self.shares = self._shares(self.device_rows)
        self.durations = (device.end - device.start)[self.device_rows]
        self.on_device = bool(len(device.rows))
        self.host_total = int(tree.inner[self.host_rows].sum())
        self.device_total = int(self.shares.sum())

    def _shares(self, rows: Integers) -> Integers:
        device = self.timeline.device
        priority = np.zeros(len(rows), np.int64)
        copies = device.of_kind(Kind.HOST_COPY) | self.timeline.events.complete(MEMCPY | MEMSET)[device.rows]
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

    def table(self, host_key: Column, device_key: Column) -> dict[int, tuple[int, int, int, int, int]]:
        """Sum by key: host events, their own time, device events, their part of the union, their durations.

        ``host_key`` is int64 like ``host_rows``, ``device_key`` like ``device_rows``.
        """
        keys, inverse = np.unique(np.concatenate((host_key, device_key)), return_inverse=True)
        host, device = inverse[: len(host_key)], inverse[len(host_key) :]
        count = len(keys)
        columns = (
            np.bincount(host, minlength=count),
            _sums(host, self.timeline.tree.inner[self.host_rows], count),
            np.bincount(device, minlength=count),
            _sums(device, self.shares, count),
            _sums(device, self.durations, count),
        )
        return {
            int(key): (int(a), int(b), int(c), int(d), int(e))
            for key, a, b, c, d, e in zip(keys, *columns, strict=True)
        }


def _sums(groups: Integers, values: Integers, count: int) -> Integers:
    total = np.zeros(count, np.int64)
    np.add.at(total, groups, values)
    return total


def by_operator(costs: Costs) -> list[Row]:
    """Return operators by phase, the most expensive first.

    Time on the host that calls of the runtime take inside an operator is the operator's.
    """
    timeline = costs.timeline
    tree, device, names = timeline.tree, timeline.device, timeline.events["name"]
    operator = timeline.operators
    here = costs.host_rows
    owner = operator[here]
    own = owner == here
    base = len(PHASES)
    # Time within no operator (annotations, Python, bare runtime calls) is no operator's time.
    inside = owner >= 0
    code = np.where(inside, names[tree.rows[owner]] if len(tree.rows) else 0, -1).astype(np.int64)
    phase = timeline.phases[np.where(inside, owner, 0)] if len(tree.rows) else owner
    host_key = np.where(inside, code * base + phase, -1)
    launcher = device.operator[costs.device_rows]
    known = launcher >= 0
    device_key = np.full(len(launcher), -1)
    if known.any():
        device_key[known] = (
            names[tree.rows[launcher[known]]].astype(np.int64) * base + timeline.phases[launcher[known]]
        )
    calls = dict(zip(*(part.tolist() for part in np.unique(host_key[own], return_counts=True)), strict=True))
    rows = []
    words = timeline.events.words["name"]
    for key, (_, host, events, part, busy) in costs.table(host_key, device_key).items():
        if key < 0:
            if events:
                rows.append(Row(NO_OPERATOR, "", "", events, 0, part, busy, costs.share(0, part)))
            continue
        name = words[key // base]
        rows.append(
            Row(
                name, PHASES[key % base].value, kind_of(name).value, int(calls.get(key, 0)), host, part, busy,
                costs.share(host, part),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: (row.share, row.host), reverse=True)


def by_kernel(costs: Costs) -> list[Row]:
    """Return device events by name, the most expensive first."""
    device, events = costs.timeline.device, costs.timeline.events
    base = len(KINDS)
    key = (
        events["name"][device.rows[costs.device_rows]].astype(np.int64) * base
        + device.kind[costs.device_rows]
    )
    none = np.full(len(costs.host_rows), -1)
    rows = [
        Row(
            events.words["name"][code // base], "", KINDS[code % base].value, count, 0, part, busy,
            costs.share(0, part),
        )
        for code, (_, _, count, part, busy) in costs.table(none, key).items()
        if code >= 0
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row.device, reverse=True)


def by_kind(costs: Costs) -> list[Row]:
    """Return kinds of operation: device events, or on a trace without a device the operators' own time."""
    timeline = costs.timeline
    owner = timeline.operators[costs.host_rows]
    inside = owner >= 0
    kinds = np.full(len(owner), -1)
    if inside.any():
        kinds[inside] = timeline.kinds[timeline.events["name"][timeline.tree.rows[owner[inside]]]]
    table = costs.table(kinds, timeline.device.kind[costs.device_rows])
    own = kinds[owner == costs.host_rows]
    rows = [
        Row(
            KINDS[code].value, "", KINDS[code].value,
            count if costs.on_device else int((own == code).sum()),
            host, part, busy, costs.share(host, part),
        )
        for code, (_, host, count, part, busy) in table.items()
        if code >= 0
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.share, row.host), reverse=True)


def by_phase(costs: Costs) -> list[Row]:
    """Return phases: own time of all host calls in them, and device time that they launched."""
    timeline = costs.timeline
    table = costs.table(timeline.phases[costs.host_rows], timeline.device.phase[costs.device_rows])
    rows = [
        Row(PHASES[code].value, PHASES[code].value, "", calls, host, part, busy, costs.share(host, part))
        for code, (calls, host, _, part, busy) in table.items()
    ]
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
    """Return indices in the tree of joined forward and backward operators, int64 [J] each.

    Autograd gives a backward node the number of the forward call that recorded it. Operators that
    call others carry the number of what they call next, so the last to start is the one that recorded.
    """
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    sequence, thread = events["sequence"][tree.rows], events["forward_thread"][tree.rows]
    operator = events.complete(OPERATOR)[tree.rows] & (sequence >= 0)
    behind = operator & events.where("name", lambda word: word.startswith(ENGINE))[tree.rows]
    if not behind.any():
        behind = operator & (thread > 0)
    ahead = operator & (thread <= 0)
    ahead_indices, behind_indices = np.flatnonzero(ahead), np.flatnonzero(behind)
    chosen = np.zeros(len(tree.rows), bool)
    chosen[costs.host_rows] = True
    behind_indices = behind_indices[chosen[behind_indices]]
    indices = np.concatenate((ahead_indices, behind_indices))
    is_behind = np.concatenate((np.zeros(len(ahead_indices), bool), np.ones(len(behind_indices), bool)))
    order = np.lexsort((is_behind, tree.start[indices], sequence[indices]))
    indices, is_behind = indices[order], is_behind[order]
    number = sequence[indices]
    # Carry the last forward along; it belongs to a backward only if the sequence number is the same.
    last = (
        np.maximum.accumulate(np.where(is_behind, -1, np.arange(len(indices)))) if len(indices) else indices
    )
    found = is_behind & (last >= 0)
    found[found] = number[last[found]] == number[found]
    return indices[last[found]], indices[found]


def sizes(tree: Tree) -> Integers:
    """Return the number of events in the subtree of each index, itself included, int64 [H]."""
    size = np.ones(len(tree.rows), np.int64)
    for level in range(int(tree.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero(tree.depth == level)
        np.add.at(size, tree.parent[here], size[here])
    return size


def device_time(costs: Costs) -> Integers:
    """Return device time launched from the subtree of each index, in nanoseconds, int64 [H]."""
    tree, device = costs.timeline.tree, costs.timeline.device
    own = np.zeros(len(tree.rows), np.int64)
    launch = device.launch[costs.device_rows]
    np.add.at(own, launch[launch >= 0], costs.shares[launch >= 0])
    total = np.concatenate(([0], np.cumsum(own)))
    here = np.arange(len(tree.rows))
    result: Integers = total[here + sizes(tree)] - total[here]
    return result


def pairs(costs: Costs, device: Integers) -> list[Pair]:
    """Return joined operators by name, the most expensive first; ``device`` is from :func:`device_time`."""
    timeline = costs.timeline
    tree, names = timeline.tree, timeline.events["name"]
    ahead, behind = joined(costs)
    words = timeline.events.words["name"]
    key = names[tree.rows[ahead]].astype(np.int64) * len(words) + names[tree.rows[behind]]
    found = []
    host = tree.end - tree.start
    for code in np.unique(key):
        here = key == code
        # Several nodes may belong to one forward, whose time counts once.
        once = np.unique(ahead[here])
        found.append(
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
        found,
        key=lambda p: (p.forward_device + p.backward_device, p.forward_host + p.backward_host),
        reverse=True,
    )
