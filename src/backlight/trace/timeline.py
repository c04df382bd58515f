"""One rank's trace with its parts joined: the tree of host calls, device events, phases and steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from backlight.records import Phase
from backlight.trace.classification import (
    DEVICE,
    ENGINE,
    HOST,
    KINDS,
    MODULE,
    MTIA_WAITS,
    OPERATOR,
    PHASES,
    RUNTIME,
    Kind,
    has_own_kind,
    kind_of,
    phase_of,
)
from backlight.trace.events import MISSING, Column, Events, Integers, Mask, Trace
from backlight.trace.host_moments import Moments, host_moments

SYNCHRONISING = re.compile(
    r"(Device|Stream|Event|Ctx)Synchronize|Memcpy(WithStream|2D|3D|DtoH|HtoD|DtoD)?(_v\d)?$|StreamWaitValue"
)
"""Runtime calls that wait for the device."""

_MAX_DIGITS = 18  # larger numbers fit into no column
_STEP = re.compile(r"^ProfilerStep\s*#(\d+)$")


@dataclass(frozen=True)
class Tree:
    """Host events by process, thread and start, so that a parent comes before its children; int64 [H] each.

    ``rows`` are those of the events, ``parent`` is the index of the enclosing event (-1 at the top),
    ``depth`` the number of enclosing ones. ``start``, ``end`` and ``inner``, the time without the children,
    are nanoseconds; ``reached`` is the end, or where a later event begins that it crosses.
    """

    rows: Integers
    parent: Integers
    depth: Integers
    thread: Integers
    start: Integers
    end: Integers
    reached: Integers
    inner: Integers

    def upwards(self, index: int) -> Iterator[int]:
        """Yield an index and those of its enclosing events, the innermost first."""
        while index >= 0:
            yield index
            index = int(self.parent[index])

    def inherited(self, marks: Integers) -> Integers:
        """Return each event's mark, or that of its nearest enclosing event with one; int64 [H], -1: none."""
        result = marks.copy()
        for level in range(1, int(self.depth.max(initial=0)) + 1):
            here = np.flatnonzero((self.depth == level) & (result < 0))
            result[here] = result[self.parent[here]]
        return result


def device_work(events: Events) -> Mask:
    """Return the events that are work on a device, bool [events]."""
    work = events.among(DEVICE) & ~events.where("name", MTIA_WAITS.__contains__)
    return work & (events["duration"] >= 0)


def tree(events: Events) -> Tree:
    """Build the tree of all host events: one lies in another of its thread if its whole interval does.

    Where two intervals cross, the later one is a sibling, and what they share counts as the later one's.
    """
    rows = np.flatnonzero(events.among(HOST) & (events["duration"] >= 0))
    threads = len(events.words["thread"]) + 1
    thread = (events["process"][rows].astype(np.int64) + 1) * threads + events["thread"][rows]
    start, end = events["start"][rows], events["start"][rows] + events["duration"][rows]
    order = np.lexsort((-end, start, thread))
    rows, thread, start, end = rows[order], thread[order], start[order], end[order]
    parent, crossing = _parents(thread, start, end)
    reached = end.copy()
    for index in crossing:
        other = index - 1
        while other != parent[index]:
            reached[other] = min(reached[other], start[index])
            other = parent[other]
    inner, nested = reached - start, parent >= 0
    np.subtract.at(inner, parent[nested], (reached - start)[nested])
    return Tree(rows, parent, _depth(parent), thread, start, end, reached, inner)


def _parents(thread: Integers, start: Integers, end: Integers) -> tuple[Integers, list[int]]:
    """Return the nearest index before each one on its thread that does not end before it, -1 for none.

    Returned as well are those that begin before the sibling before them has ended.
    """
    parent = np.arange(len(end)) - 1
    parent[np.diff(thread, prepend=-1) != 0] = -1
    # All between an index and its candidate end before it: where the candidate ends too early too, its own
    # candidate is the next. Steps between siblings double in length, since all take theirs at once.
    crossing: set[int] = set()
    at = np.flatnonzero(np.diff(end, prepend=end[:1]) > 0)
    while len(at):
        before = parent[at]
        is_early = (before >= 0) & (end[before] < end[at])
        at, before = at[is_early], before[is_early]
        crossing.update(at[end[before] > start[at]].tolist())
        parent[at] = parent[before]
    return parent, sorted(crossing)


def _depth(parent: Integers) -> Integers:
    depth = np.zeros(len(parent), np.int64)
    at, outer = np.arange(len(parent)), parent
    while len(at := at[outer >= 0]):
        depth[at] += 1
        outer = parent[outer[outer >= 0]]
    return depth


@dataclass(frozen=True)
class Step:
    """One window of the trace; ``number`` is None where the trace has no steps and is one window."""

    number: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Device:
    """The device events of a trace by start, int64 [D] each; ``start`` and ``end`` are nanoseconds.

    ``launch`` and ``operator`` are indices in the tree of the call that launched the event and of the
    innermost operator around it, -1 for none; ``kind`` and ``phase`` those in :data:`KINDS` and
    :data:`PHASES`.
    """

    rows: Integers
    start: Integers
    end: Integers
    device: Integers
    launch: Integers
    operator: Integers
    kind: Integers
    phase: Integers

    def of_kind(self, kind: Kind) -> Column:
        """Return which events are of a kind."""
        chosen: Column = self.kind == KINDS.index(kind)
        return chosen


class Timeline:
    """One trace with its parts joined; each part is computed at its first use."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def events(self) -> Events:
        """The events; an operator, annotation or function open at the end of its step is cut off there.

        One is the call of an optimizer whose hook ends the step: the rest of it is the profiler's own time
        between two steps.
        """
        events = self.trace.events
        rows = np.flatnonzero(events.among(HOST - RUNTIME) & (events["duration"] > 0))
        step = self.step_of(events["start"][rows])
        rows, step = rows[step >= 0], step[step >= 0]
        ends = np.array([step.end for step in self.steps], dtype=np.int64)[step]
        duration = events["duration"].copy()
        duration[rows] = np.minimum(duration[rows], ends - events["start"][rows])
        return Events({**events.columns, "duration": duration}, events.words)

    @cached_property
    def tree(self) -> Tree:
        """The tree of host calls."""
        return tree(self.events)

    @cached_property
    def phases(self) -> Integers:
        """Phase of each index of the tree, as an index in :data:`PHASES`; the innermost mark counts.

        Marks come from annotations, the autograd engine's own ranges and losses by name. Unmarked operators
        that autograd recorded are forward, except after a backward, such as norms of gradients. All others
        are other.
        """
        events, tree = self.events, self.tree
        marks = [phase_of(word) for word in events.words["name"]]
        by_name = np.array([MISSING if mark is None else PHASES.index(mark) for mark in marks] + [MISSING])
        result = tree.inherited(by_name[events["name"][tree.rows]].astype(np.int64))
        recorded = events.among(OPERATOR) & (events["sequence"] >= 0) & (events["forward_thread"] <= 0)
        weak = (result < 0) & recorded[tree.rows]
        weak[weak] = ~self._follows_backward(np.flatnonzero(weak), result)
        inherited = tree.inherited(np.where(weak, PHASES.index(Phase.FORWARD), result))
        result = np.where(result < 0, inherited, result)
        return np.where(result < 0, PHASES.index(Phase.OTHER), result)

    def _follows_backward(self, calls: Integers, marks: Integers) -> Mask:
        """Return which unmarked operators come after a backward and are not of a further forward.

        A further forward has begun with an operator that a later backward differentiates, or after another
        mark, such as the optimizer's, if a backward follows in the step.
        """
        tree = self.tree
        backward = marks == PHASES.index(Phase.BACKWARD)
        if not backward.any():
            return np.zeros(len(calls), bool)
        time = tree.start[calls]
        order = np.arange(len(tree.rows))
        is_outermost = (self.operators == order) & ((tree.parent < 0) | (self.operators[tree.parent] < 0))
        forward = tree.inherited(np.where(is_outermost, order, -1))[self.differentiated[0]]
        ended = _latest(tree.end[backward], time)
        resumed = np.maximum(
            _latest(tree.start[forward], time), _latest(tree.start[(marks >= 0) & ~backward], time)
        )
        starts = np.sort(tree.start[backward])
        following = starts[np.minimum(np.searchsorted(starts, time), len(starts) - 1)]
        step = self.step_of(time)
        is_last = (self.step_of(ended) == step) & ~((following > time) & (self.step_of(following) == step))
        is_last &= (self.steps[0].number is not None) & (_latest(tree.start[forward], time) < ended)
        result: Mask = (ended >= 0) & ((resumed < ended) | is_last)
        return result

    @cached_property
    def operators(self) -> Integers:
        """Index of the innermost operator at or around each index of the tree, -1 for none."""
        is_operator = self.events.among(OPERATOR)[self.tree.rows]
        return self.tree.inherited(np.where(is_operator, np.arange(len(is_operator)), -1))

    @cached_property
    def differentiated(self) -> tuple[Integers, Integers]:
        """Indices in the tree of forward operators and of their evaluations in backward, int64 [J] each.

        Autograd gives a node of backward the number of the forward call that recorded it. Operators that call
        others carry the number of what they call next, so the last to start is the one that recorded.
        """
        tree, events = self.tree, self.events
        sequence, thread = events["sequence"][tree.rows], events["forward_thread"][tree.rows]
        operator = events.among(OPERATOR)[tree.rows] & (sequence >= 0)
        behind = operator & events.where("name", lambda word: word.startswith(ENGINE))[tree.rows]
        if not behind.any():
            behind = operator & (thread > 0)
        ahead = operator & (thread <= 0)
        indices = np.concatenate((np.flatnonzero(ahead), np.flatnonzero(behind)))
        is_behind = np.arange(len(indices)) >= np.count_nonzero(ahead)
        order = np.lexsort((is_behind, tree.start[indices], sequence[indices]))
        indices, is_behind = indices[order], is_behind[order]
        number = sequence[indices]
        # Carry the last forward along; it belongs to a backward only if the sequence number is the same.
        last = np.maximum.accumulate(np.where(is_behind, -1, np.arange(len(indices))))
        is_joined = is_behind & (last >= 0)
        is_joined[is_joined] = number[last[is_joined]] == number[is_joined]
        return indices[last[is_joined]], indices[is_joined]

    @cached_property
    def kinds(self) -> Integers:
        """Kind of each word of the names."""
        kinds = [KINDS.index(kind_of(word)) for word in self.events.words["name"]]
        return np.array([*kinds, KINDS.index(Kind.OTHER)], dtype=np.int64)

    @property
    def kind_names(self) -> tuple[str, ...]:
        """Names of the kinds in the order of their codes."""
        return tuple(kind.value for kind in KINDS)

    @cached_property
    def waits(self) -> Mask:
        """Whether each index of the tree is a call of the runtime that waits for the device, bool [H].

        Besides those that wait by their name: a copy from or to pageable memory that returns after its own
        device event (``.item()``, ``.cpu()``), though its call is named asynchronous.
        """
        events, device = self.events, self.device
        runtime = events.among(RUNTIME)
        waits = (runtime & events.where("name", lambda word: bool(SYNCHRONISING.search(word))))[
            self.tree.rows
        ]
        copies = runtime & events.where("name", lambda word: "memcpy" in word.lower())
        pageable = events.where("name", lambda w: kind_of(w) is Kind.HOST_COPY and "pinned" not in w.lower())
        copied = np.flatnonzero((device.launch >= 0) & pageable[device.rows])
        copied = copied[copies[self.tree.rows[device.launch[copied]]]]
        waits[device.launch[copied[device.end[copied] <= self.tree.end[device.launch[copied]]]]] = True
        return waits

    @cached_property
    def steps(self) -> list[Step]:
        """The steps by start; the whole trace as one where nothing marks a step."""
        events, rows = self.trace.events, np.flatnonzero(self.step_marks)
        steps = [
            Step(
                int(events.word("name", row).partition("#")[2]),
                int(events["start"][row]),
                int(events["start"][row] + events["duration"][row]),
            )
            for row in rows.tolist()
        ]
        return sorted(steps, key=lambda step: step.start) or [self.whole]

    @cached_property
    def step_marks(self) -> Mask:
        """The events that mark a step on the host, bool [events]."""
        events = self.trace.events
        named = events.where("name", lambda word: bool(_STEP.match(word)))
        return named & ~events.among(frozenset({"gpu_user_annotation"})) & (events["duration"] > 0)

    @cached_property
    def whole(self) -> Step:
        """The window from the first to the last event that is work."""
        events = self.trace.events
        mask = device_work(events) | (events.among(HOST) & (events["duration"] >= 0))
        if not mask.any():
            return Step(None, 0, 0)
        start = events["start"][mask]
        return Step(None, int(start.min()), int((start + events["duration"][mask]).max()))

    @cached_property
    def moments(self) -> Moments:
        """The calls that the host is in during the steps, each moment once."""
        return host_moments(self)

    @cached_property
    def device(self) -> Device:
        """The device events."""
        events = self.events
        rows = np.flatnonzero(device_work(events))
        rows = rows[np.argsort(events["start"][rows], kind="stable")]
        launch = self._launches(rows)
        launched = launch >= 0
        operator = np.where(launched, self.operators[launch], -1) if len(self.operators) else launch
        phase = np.full(len(rows), PHASES.index(Phase.OTHER))
        if launched.any():
            phase[launched] = self.phases[launch[launched]]
        kind = self._device_kinds(rows, launch, operator)
        # All arithmetic in an optimizer step is optimizer.
        mild = np.isin(kind, [KINDS.index(k) for k in (Kind.ELEMENTWISE, Kind.REDUCTION, Kind.OTHER)])
        kind[mild & (phase == PHASES.index(Phase.OPTIMIZER))] = KINDS.index(Kind.OPTIMIZER)
        processes = [
            int(word) if word.isdecimal() and len(word) <= _MAX_DIGITS else code
            for code, word in enumerate(events.words["process"])
        ]
        process = np.array([*processes, MISSING], dtype=np.int64)[events["process"][rows]]
        number = np.where(events["device"][rows] >= 0, events["device"][rows], process)
        return Device(
            rows,
            events["start"][rows],
            events["start"][rows] + events["duration"][rows],
            number.astype(np.int64),
            launch,
            operator.astype(np.int64),
            kind,
            phase.astype(np.int64),
        )

    def _device_kinds(self, rows: Integers, launch: Integers, operator: Integers) -> Integers:
        """Return the kind of each device event: of the operator that launched it, else by its own name.

        Where both say nothing, the calls around decide, from the innermost: operators, then modules.
        """
        names, other = self.events["name"], KINDS.index(Kind.OTHER)
        result = self.kinds[names[rows]]
        if not len(self.tree.rows):
            return result
        by_name = self.events.where("name", has_own_kind)[rows]
        launching = np.where(operator >= 0, self.kinds[names[self.tree.rows[operator]]], other)
        launching[launching == KINDS.index(Kind.VIEW)] = other  # a view has no work for a device
        result = np.where(by_name | (launching == other), result, launching)
        unknown = (result == other) & (launch >= 0)
        if unknown.any():
            is_call = self.events.among(OPERATOR) | self.events.where("name", lambda w: w.startswith(MODULE))
            of_call = np.where(is_call[self.tree.rows], self.kinds[names[self.tree.rows]], other)
            around = self.tree.inherited(np.where(of_call == other, -1, of_call))[launch[unknown]]
            result[unknown] = np.where(around < 0, other, around)
        return result

    def _launches(self, rows: Integers) -> Integers:
        """Find the host call of each device event, by correlation, else by the operator's id."""
        events, index = self.events, self.tree.rows
        runtime = events.among(RUNTIME)[index]
        by_correlation = _match(events["correlation"][rows], events["correlation"][index], runtime)
        operator = events.among(OPERATOR)[index]
        by_id = _match(events["external"][rows], events["external"][index], operator)
        return np.where(by_correlation >= 0, by_correlation, by_id)

    def step_of(self, times: Integers) -> Integers:
        """Return the number in :attr:`steps` of the step that each time lies in, -1 for none."""
        starts = np.array([step.start for step in self.steps], dtype=np.int64)
        ends = np.array([step.end for step in self.steps], dtype=np.int64)
        index = np.searchsorted(starts, times, side="right") - 1
        return np.where((index >= 0) & (times < ends[index]), index, -1)

    def name(self, row: int) -> str:
        """Return the name of an event."""
        return self.events.word("name", row)


def _latest(moments: Integers, times: Integers) -> Integers:
    """Return the latest of ``moments`` up to each time, -1 for none."""
    ordered = np.concatenate(([-1], np.sort(moments)))
    return ordered[np.searchsorted(ordered, times, side="right") - 1]


def _match(wanted: Integers, keys: Integers, among: Column) -> Integers:
    """Return, for each of ``wanted``, the first index of ``keys`` that equals it, -1 for none."""
    indices = np.flatnonzero(among & (keys > 0))
    if not len(indices):
        return np.full(len(wanted), -1)
    indices = indices[np.argsort(keys[indices], kind="stable")]
    at = np.searchsorted(keys[indices], wanted)
    at = np.minimum(at, len(indices) - 1)
    return np.where(keys[indices][at] == wanted, indices[at], -1)
