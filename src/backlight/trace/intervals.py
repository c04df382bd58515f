"""Unions, overlaps and shares of time intervals, in whole nanoseconds.

All intervals are half open, ``[start, end)``; a union is sorted and disjoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from backlight.trace.events import Integers


@dataclass(frozen=True)
class Union:
    """Disjoint intervals in order, int64 [N] each."""

    start: Integers
    end: Integers

    @property
    def length(self) -> int:
        """Total length in nanoseconds."""
        return int((self.end - self.start).sum())

    @cached_property
    def _before(self) -> Integers:
        lengths = self.end - self.start
        result: Integers = np.cumsum(lengths) - lengths
        return result

    def before(self, times: Integers) -> Integers:
        """Return the length of the set before each of ``times``, int64 like ``times``."""
        if not len(self.start):
            return np.zeros(len(times), np.int64)
        index = np.searchsorted(self.start, times, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.clip(np.minimum(times, self.end[last]) - self.start[last], 0, None)
        result: Integers = np.where(index > 0, self._before[last] + inside, 0)
        return result

    def covered(self, start: Integers, end: Integers) -> Integers:
        """Return the length of the set inside each interval ``[start, end)``."""
        return self.before(end) - self.before(start)

    def within(self, start: int, end: int) -> Union:
        """Return the part of the set in one window."""
        first = int(np.searchsorted(self.end, start, side="right"))
        last = int(np.searchsorted(self.start, end, side="left"))
        return Union(np.maximum(self.start[first:last], start), np.minimum(self.end[first:last], end))

    def gaps(self, start: int, end: int) -> Union:
        """Return the rest of the window outside of the set."""
        inside = self.within(start, end)
        starts = np.concatenate(([start], inside.end))
        ends = np.concatenate((inside.start, [end]))
        open_ = ends > starts
        return Union(starts[open_].astype(np.int64), ends[open_].astype(np.int64))


EMPTY = Union(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Integers, end: Integers) -> Union:
    """Return the union of intervals in any order; empty ones count for nothing."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    return Union(start[opens], np.append(reach[:-1][opens[1:]], reach[-1]))


def shares(start: Integers, end: Integers, priority: Integers) -> Integers:
    """Divide the union of overlapping intervals among them, so that the parts add up to its length.

    A moment that several intervals cover goes to the lowest ``priority``, and there to the one that began
    first.
    """
    result = np.zeros(len(start), np.int64)
    taken = EMPTY
    for level in np.unique(priority):
        rows = np.flatnonzero(priority == level)
        rows = rows[np.argsort(start[rows], kind="stable")]
        begin, finish = start[rows], end[rows]
        reach = np.concatenate((begin[:1], np.maximum.accumulate(finish)[:-1]))
        begin = np.minimum(np.maximum(begin, reach), np.maximum(finish, begin))
        finish = np.maximum(finish, begin)
        result[rows] = finish - begin - taken.covered(begin, finish)
        taken = union(np.concatenate((taken.start, start[rows])), np.concatenate((taken.end, end[rows])))
    return result
