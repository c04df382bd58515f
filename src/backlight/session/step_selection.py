"""Which recorded steps of a long run are stored: all, later the first of a window and what stands out.

What is stored grows with the logarithm of the steps: 4,096 steps whole, and of every doubling after them
1,024 windows with one to four steps each. What stays is a step that was measured, never an average.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

WHOLE_STEPS = 4096
"""Steps at the start of which everything that is recorded is stored."""

WINDOW = 4
"""Steps of a window right after them; it doubles whenever the number of steps has."""

MAX_DETAILED_STEPS = 4096
"""Steps around alarms that are stored besides."""

COMPARED_WINDOWS = 32
"""Windows whose highest values a later one must exceed for its step to be stored."""

T = TypeVar("T")


def window_of(step: int) -> tuple[int, int]:
    """Return size and number of the window of a step; size 1 while everything is stored."""
    octave = (step // WHOLE_STEPS).bit_length()
    size = (WINDOW << octave) >> 1 if octave else 1
    return size, step // size


class StepSelection(Generic[T]):
    """Passes on what is stored of recorded steps, in order."""

    def __init__(self) -> None:
        self._window = (0, -1)
        self._has_updates = False
        self._highest: list[float] = []
        self._earlier: list[deque[float]] = []
        self._held: dict[int, tuple[int, T]] = {}
        self._detailed = 0

    def add(
        self, step: int, item: T, scores: Sequence[float], *, updates: bool = False, in_detail: bool = False
    ) -> list[T]:
        """Return what is to be stored now: the first step of a window, and of that before it what stands out.

        A step stands out where one of its ``scores``, of which NaN is the highest, is that of its window and
        exceeds those of the :data:`COMPARED_WINDOWS` before: storing the highest of each window would let the
        run look worse than it is. Also stored are the first step of a window with ``updates``, which are
        measured at fewer steps, and some ``in_detail``.
        """
        self._earlier = self._earlier or [deque(maxlen=COMPARED_WINDOWS) for _ in scores]
        ranked = [math.inf if math.isnan(score) else score for score in scores]
        window = window_of(step)
        if window[0] == 1 or window != self._window:
            stored = [*self.flush(), item]
            self._window, self._highest, self._has_updates = window, ranked, updates
            return stored
        if (updates and not self._has_updates) or (in_detail and self._detailed < MAX_DETAILED_STEPS):
            self._detailed += in_detail
            self._has_updates = self._has_updates or updates
            return [*self._taken(), item]
        for i, score in enumerate(ranked):
            if score > self._highest[i]:
                self._highest[i], self._held[i] = score, (step, item)
        return []

    def flush(self) -> list[T]:
        """Return the steps of the window that stand out, in order, and begin another."""
        stored = self._taken()
        for earlier, score in zip(self._earlier, self._highest, strict=False):  # no window at the start
            earlier.append(score)
        self._highest = []
        return stored

    def _taken(self) -> list[T]:
        held = dict(
            held
            for i, held in self._held.items()
            if self._highest[i] > max(self._earlier[i], default=-math.inf)
        )
        self._held.clear()
        return [held[step] for step in sorted(held)]
