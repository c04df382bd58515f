"""One rank's trace with its parts joined: host calls, device events, the steps they belong to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from backlight.records import Phase
from backlight.trace import categories
from backlight.trace.call_tree import Tree, tree
from backlight.trace.events import COMPLETE, Column, Events, Integers, Trace
from backlight.trace.kinds import Kind, kind_of
from backlight.trace.phases import PHASES, phases

KINDS = tuple(Kind)
"""A kind is stored as its place in this tuple."""

_STEP = re.compile(r"^ProfilerStep\s*#(\d+)$")


@dataclass(frozen=True)
class Step:
    """One window of the trace; ``number`` is None where the trace has no steps and is one window."""

    number: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Device:
    """The device events of a trace, by start.

    Attributes
    ----------
    rows:
        Rows of the events, int64 [D].
    start, end:
        Nanoseconds.
    device:
        Number of the device.
    stream:
        Number of the stream.
    launch:
        Place in the tree of the call that launched it, -1 where the trace does not say.
    operator:
        Place in the tree of the innermost operator around that call, -1 for none.
    kind, phase:
        Places in :data:`KINDS` and :data:`PHASES`.
    """

    rows: Integers
    start: Integers
    end: Integers
    device: Integers
    stream: Integers
    launch: Integers
    operator: Integers
    kind: Integers
    phase: Integers

    def of_kind(self, kind: Kind) -> Column:
        """Return which events are of a kind."""
        chosen: Column = self.kind == KINDS.index(kind)
        return chosen


class Timeline:
    """What every table of a trace is made from; parts are joined when they are first asked for."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: Events = trace.events

    @cached_property
    def tree(self) -> Tree:
        """The tree of host calls."""
        return tree(self.events)

    @cached_property
    def phases(self) -> Integers:
        """Phase of each place of the tree."""
        return phases(self.events, self.tree)

    @cached_property
    def operators(self) -> Integers:
        """Place of the innermost operator at or around each place of the tree, -1 for none."""
        is_operator = categories.rows(self.events, categories.OPERATOR)[self.tree.rows]
        return self.tree.inherited(np.where(is_operator, np.arange(len(is_operator)), -1))

    @cached_property
    def kinds(self) -> Integers:
        """Kind of each word of the names."""
        found = [KINDS.index(kind_of(word)) for word in self.events.words["name"]]
        return np.array([*found, KINDS.index(Kind.OTHER)], dtype=np.int64)

    @cached_property
    def steps(self) -> list[Step]:
        """The steps by start; the whole trace as one where nothing marks a step."""
        events = self.events
        numbers = {
            code: int(found[1])
            for code, word in enumerate(events.words["name"])
            if (found := _STEP.match(word))
        }
        accept = [code in numbers for code in range(len(events.words["name"]))]
        rows = np.flatnonzero(
            categories.named(events, accept)
            & ~_on_device_row(events)
            & (events["kind"] == COMPLETE)
            & (events["duration"] > 0)
        )
        steps = [
            Step(
                numbers[int(events["name"][row])],
                int(events["start"][row]),
                int(events["start"][row] + events["duration"][row]),
            )
            for row in rows
        ]
        return sorted(steps, key=lambda step: step.start) or [self.whole]

    @cached_property
    def whole(self) -> Step:
        """The window from the first to the last event that is work."""
        mask = categories.rows(self.events, categories.HOST | categories.DEVICE) & (
            self.events["duration"] >= 0
        )
        if not mask.any():
            return Step(None, 0, 0)
        start = self.events["start"][mask]
        return Step(None, int(start.min()), int((start + self.events["duration"][mask]).max()))

    @cached_property
    def device(self) -> Device:
        """The device events."""
        events = self.events
        mask = categories.rows(events, categories.DEVICE) & (events["duration"] >= 0)
        rows = np.flatnonzero(mask)
        rows = rows[np.argsort(events["start"][rows], kind="stable")]
        launch = self._launches(rows)
        launched = launch >= 0
        operator = np.where(launched, self.operators[launch], -1) if len(self.operators) else launch
        phase = np.full(len(rows), PHASES.index(Phase.OTHER))
        if launched.any():
            phase[launched] = self.phases[launch[launched]]
        kind = self.kinds[events["name"][rows]]
        # A name that says little takes the kind of its operator; in an optimizer all arithmetic is its.
        vague = (kind == KINDS.index(Kind.OTHER)) & (operator >= 0)
        if vague.any():
            kind[vague] = self.kinds[events["name"][self.tree.rows[operator[vague]]]]
        mild = np.isin(kind, [KINDS.index(Kind.ELEMENTWISE), KINDS.index(Kind.OTHER)])
        kind[mild & (phase == PHASES.index(Phase.OPTIMIZER))] = KINDS.index(Kind.OPTIMIZER)
        number = np.where(events["device"][rows] >= 0, events["device"][rows], events["process"][rows])
        return Device(
            rows,
            events["start"][rows],
            events["start"][rows] + events["duration"][rows],
            number.astype(np.int64),
            np.where(events["stream"][rows] >= 0, events["stream"][rows], events["thread"][rows]).astype(
                np.int64
            ),
            launch,
            operator.astype(np.int64),
            kind,
            phase.astype(np.int64),
        )

    def _launches(self, rows: Integers) -> Integers:
        """Find the host call of each device event, by correlation, else by the operator's id."""
        events, place = self.events, self.tree.rows
        runtime = categories.rows(events, categories.RUNTIME)[place]
        found = _match(events["correlation"][rows], events["correlation"][place], runtime)
        operator = categories.rows(events, categories.OPERATOR)[place]
        by_id = _match(events["external"][rows], events["external"][place], operator)
        return np.where(found >= 0, found, by_id)

    def step_of(self, times: Integers) -> Integers:
        """Return the number in :attr:`steps` of the step that each time lies in, -1 for none."""
        starts = np.array([step.start for step in self.steps], dtype=np.int64)
        ends = np.array([step.end for step in self.steps], dtype=np.int64)
        place = np.searchsorted(starts, times, side="right") - 1
        return np.where((place >= 0) & (times < ends[place]), place, -1)

    def name(self, row: int) -> str:
        """Return the name of an event."""
        return self.events.word("name", row)


def _on_device_row(events: Events) -> Column:
    return categories.rows(events, frozenset({"gpu_user_annotation"}))


def _match(wanted: Integers, known: Integers, among: Column) -> Integers:
    """Return, for each of ``wanted``, the first place of ``known`` that equals it, -1 for none."""
    places = np.flatnonzero(among & (known > 0))
    if not len(places):
        return np.full(len(wanted), -1)
    places = places[np.argsort(known[places], kind="stable")]
    at = np.searchsorted(known[places], wanted)
    at = np.minimum(at, len(places) - 1)
    return np.where(known[places][at] == wanted, places[at], -1)
