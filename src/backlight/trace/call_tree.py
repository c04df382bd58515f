"""The tree of calls of each host thread, from intervals alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace import categories
from backlight.trace.events import Events, Integers


@dataclass(frozen=True)
class Tree:
    """Host events in the order of their threads and starts.

    Attributes
    ----------
    rows:
        Rows of the events, int64 [H], by process, thread, start; a parent stands before its children.
    parent:
        Place in ``rows`` of the enclosing event, -1 at the top, int64 [H].
    depth:
        Number of enclosing events, int64 [H].
    thread:
        Number of the process and thread, int64 [H].
    start, end, inner:
        Nanoseconds: begin and end of the event, and its time less that of its children.
    """

    rows: Integers
    parent: Integers
    depth: Integers
    thread: Integers
    start: Integers
    end: Integers
    inner: Integers

    def inherited(self, marks: Integers) -> Integers:
        """Give every event the mark of itself or else of its nearest enclosing event that has one.

        ``marks`` is int64 [H], negative for none. Outer marks do not override inner ones.
        """
        result = marks.copy()
        for level in range(1, int(self.depth.max(initial=0)) + 1):
            here = np.flatnonzero((self.depth == level) & (result < 0))
            result[here] = result[self.parent[here]]
        return result


def tree(events: Events) -> Tree:
    """Build the tree of all host events.

    An event lies in another of its thread if its whole interval does. Where clocks are rough and two
    intervals cross, the later one is taken as a sibling, and what they share counts as the later one's.
    """
    rows = np.flatnonzero(categories.rows(events, categories.HOST) & (events["duration"] >= 0))
    pairs = (
        events["process"][rows].astype(np.int64) << 32 | events["thread"][rows].astype(np.int64) & 0xFFFFFFFF
    )
    _, thread = np.unique(pairs, return_inverse=True)
    start, end = events["start"][rows], events["start"][rows] + events["duration"][rows]
    order = np.lexsort((rows, -end, start, thread))
    rows, thread, start, end = rows[order], thread[order].astype(np.int64), start[order], end[order]
    parent, depth, crossed = _parents(thread, start, end)
    inner = end - start
    inside = parent >= 0
    np.subtract.at(inner, parent[inside], (end - start)[inside])
    for place, overlap in crossed:
        inner[place] -= overlap
    return Tree(rows, parent, depth, thread, start, end, np.maximum(inner, 0))


def _parents(
    thread: Integers, start: Integers, end: Integers
) -> tuple[Integers, Integers, list[tuple[int, int]]]:
    """Return parent and depth of each place, and what to take from whom where intervals cross.

    A moment in two intervals that cross belongs to the later one; what encloses both has lost it twice.
    """
    parents, depths = [-1] * len(end), [0] * len(end)
    stack: list[int] = []
    ends: list[int] = []
    crossed: list[tuple[int, int]] = []
    current = -1
    for place, (number, begin, finish) in enumerate(
        zip(thread.tolist(), start.tolist(), end.tolist(), strict=True)
    ):
        if number != current:
            current, stack, ends = number, [], []
        reached = begin
        while ends and ends[-1] < finish:
            before, ended = stack.pop(), ends.pop()
            if ended > reached:
                crossed.append((before, ended - reached))
                reached = ended
        if stack:
            parents[place] = stack[-1]
            depths[place] = len(stack)
            if reached > begin:
                crossed.append((stack[-1], begin - reached))
        stack.append(place)
        ends.append(finish)
    return np.array(parents, dtype=np.int64), np.array(depths, dtype=np.int64), crossed
