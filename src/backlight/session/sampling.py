"""Which steps of a run are recorded: every Nth, or as many as the budget of time allows.

All times are of processors and devices. Wall time would depend on what else a machine does: with ten
processes for a core, 3 ms of measuring became 0.7 s, and the run was thinned. The cost is the processor time
of backlight, on the training thread and on its own, and the device time of recorded steps. It is compared
with the processor time of the training thread, which the work of a run determines as well. What the thread
waits for is not in it: data, or a device whose driver lets the thread sleep. Such a run is recorded less than
1 % of its wall time would allow, never more.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from backlight import clock

# Which recorded steps of a long run are stored: all, later the first of a window and what stands out.
#
# What is stored grows with the logarithm of the steps: 4,096 steps whole, and of every doubling after them
# 1,024 windows with one to four steps each. What stays is a step that was measured, never an average.

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
        self._best: dict[int, tuple[int, T]] = {}
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
                self._highest[i], self._best[i] = score, (step, item)
        return []

    def flush(self) -> list[T]:
        """Return the steps of the window that stand out, in order, and begin another."""
        stored = self._taken()
        for earlier, score in zip(self._earlier, self._highest, strict=False):  # no window at the start
            earlier.append(score)
        self._highest = []
        return stored

    def _taken(self) -> list[T]:
        items = dict(
            entry
            for i, entry in self._best.items()
            if self._highest[i] > max(self._earlier[i], default=-math.inf)
        )
        self._best.clear()
        return [items[step] for step in sorted(items)]


BUDGET = 0.01
"""Share of the time of a run that the default monitors may take together."""

FIRST_STEPS = 64
"""Steps at the start of which every one is recorded, so that a very short run is recorded whole."""

FIRST_S = 0.3
"""Seconds on the training thread and the device for which the first steps are recorded whole, by what each of
the first few cost; dearer ones are recorded at wider spacing from the start."""

GRACE_S = 0.1
"""Seconds that the steps may have cost before the budget binds.

They are no extra: a run that goes on records less until the budget holds for all of it. Start and end come
on top, which ``bench/startup.py`` measures.
"""

CATCH_UP = 0.5
"""Share of the budget that is spent while a run has cost more than the budget."""

MAX_WIDENING = 16
"""Factor by which the spacing grows at most at once: a single slow step is no measure."""

MAX_SPACING = 1024
"""Widest spacing that the budget may lead to."""

_REVIEW_STEPS = 32
_FIRST_REVIEWS = (2, 8, 16, 32)  # what the steps before the first of them cost is a cost of the start


class ProcessorTime:
    """Processor seconds of the thread that trains, also where another thread takes over."""

    def __init__(self) -> None:
        self._thread, self._last, self._elapsed = 0, 0.0, 0.0

    def elapsed(self) -> float:
        """Return the seconds since the first call; called on the training thread."""
        thread, now = threading.get_ident(), clock.thread_time()
        if thread == self._thread:
            self._elapsed += now - self._last
        self._thread, self._last = thread, now
        return self._elapsed


@dataclass
class Sampling:
    """Decides which steps are recorded: every Nth, or as many as the budget allows, on a regular grid.

    Without ``every`` a share ``budget`` of the elapsed time may be spent, in any case ``grace`` seconds, and
    :data:`FIRST_S` for the first steps. What exceeds them widens the spacing by a power of two; it halves
    again once there is room. Where optimizers step in turn, ``turns`` is the steps of a round, which is
    recorded whole or not at all: of a GAN, every other step would show one network only.
    """

    every: int | None = None
    budget: float = BUDGET
    grace: float = GRACE_S
    spacing: int = 1
    turns: int = 1
    _detail_until: int = -1
    _reviewed: int = 0
    _spent: float = 0.0
    _elapsed: float = 0.0
    _measured: float = 0.0

    def __post_init__(self) -> None:
        if self.every is not None:
            if self.every < 1:
                raise ValueError(f"every={self.every}: expected a step count of 1 or more")
            self.spacing = self.every

    def wants(self, step: int) -> bool:
        """Return whether ``step`` is recorded."""
        return step // self.turns % self.spacing == 0 or step <= self._detail_until

    def detail(self, step: int, steps: int) -> None:
        """Record every one of the next ``steps`` steps, because of an alarm."""
        self._detail_until = max(self._detail_until, step + steps)

    def next(self, step: int) -> int:
        """Return the first step after ``step`` that is recorded."""
        if step < self._detail_until or self.wants(step + 1):
            return step + 1
        period = self.turns * self.spacing
        return step - step % period + period

    def in_detail(self, step: int) -> bool:
        """Return whether ``step`` belongs to steps that an alarm asked for."""
        return step <= self._detail_until

    def is_due(self, step: int) -> bool:
        """Return whether the spacing is to be reviewed at ``step``."""
        due = max(self._reviewed + max(_REVIEW_STEPS, self.turns * self.spacing), FIRST_STEPS)
        return self.every is None and (step >= due or step in _FIRST_REVIEWS)

    def review(self, step: int, spent: float, elapsed: float, measured: float) -> int | None:
        """Return the new spacing if ``spent`` of ``elapsed`` seconds asks for another, else None.

        ``measured`` is the part of ``spent`` that recorded steps take of the training thread and the device:
        what threads of the watch take near its start, such as the first evaluation, is taken once.
        """
        if not self.is_due(step):
            return None
        steps, recent = step - self._reviewed, (spent - self._spent, elapsed - self._elapsed)
        of_steps, self._measured = measured - self._measured, measured
        self._reviewed, self._spent, self._elapsed = step, spent, elapsed
        if step < FIRST_STEPS:
            first_s = FIRST_STEPS / steps * of_steps
            if step == _FIRST_REVIEWS[0] or first_s <= FIRST_S or of_steps <= self.budget * recent[1]:
                return None
            return self._widen(first_s, FIRST_S)
        over = spent > max(self.grace, self.budget * elapsed)
        allowed = CATCH_UP * self.budget * recent[1]
        if over and recent[0] > allowed and self.spacing < MAX_SPACING:
            return self._widen(recent[0], allowed)
        if not over and self.spacing > 1 and recent[0] < 0.4 * self.budget * recent[1]:
            self.spacing //= 2
            return self.spacing
        return None

    def _widen(self, spent: float, allowed: float) -> int:
        most = min(MAX_SPACING, self.spacing * MAX_WIDENING)
        while self.spacing < most and spent > allowed:
            self.spacing, allowed = 2 * self.spacing, 2 * allowed
        return self.spacing
