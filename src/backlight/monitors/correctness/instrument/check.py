"""What every check shares: the steps that it observes, reports, and values that are still on a device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from backlight.capture.hub import Listener
from backlight.measure.transfer import AsyncCopy, start_copy
from backlight.monitors.correctness.instrument.loaded_weights import LoadedWeights
from backlight.monitors.correctness.model.contradictions import KIND

if TYPE_CHECKING:
    from backlight.monitor import RunContext

FIRST_STEPS = 8
"""Steps at the start of a run that are all observed."""

GROWTH = 1.6
"""Factor between the starts of later observations."""

WINDOW_STEPS = 2
"""Steps in a row of a later observation: many facts compare one step with the next."""

NAMED = 5
"""Parameters or modules that a report names."""

MAX_REPORTS = 16
"""Contradictions of one kind that a process records."""


class PendingCopies:
    """Copies on their way from a device, with what is done with each, in order; the checks share one."""

    def __init__(self) -> None:
        self._copies: deque[tuple[AsyncCopy, Callable[[NDArray[np.generic]], None]]] = deque()

    def add(self, values: torch.Tensor, then: Callable[[NDArray[np.generic]], None]) -> None:
        """Call ``then`` with the host copy of ``values`` as soon as it is there."""
        # NumPy has no bfloat16.
        copy = start_copy(values.float() if values.dtype is torch.bfloat16 else values)
        if copy.event is None:
            then(copy.read())
        else:
            self._copies.append((copy, then))

    def settle(self, *, wait: bool) -> None:
        """Use the copies that have arrived; ``wait`` for the others as well."""
        while self._copies and (wait or self._copies[0][0].done()):
            copy, then = self._copies.popleft()
            then(copy.read())


class Schedule:
    """Which steps are observed: the first ones, then windows of a few steps at growing intervals.

    ``due`` is whether this step is, ``near`` whether it or the step before or after it is, ``observed`` how
    many steps were. ``copies`` are those of all checks, ``loaded`` the weights that come from a file.
    """

    def __init__(self) -> None:
        self._begin = round(FIRST_STEPS * GROWTH)
        self.due = self.near = True
        self.observed = 0
        self.copies = PendingCopies()
        self.loaded = LoadedWeights()

    def begin(self, step: int) -> None:
        """Decide about ``step``; steps only grow."""
        self.observed += self.due and step > 0  # the step before, which is over
        while step > self._begin + WINDOW_STEPS:
            self._begin = max(round(self._begin * GROWTH), self._begin + WINDOW_STEPS)
        end = self._begin + WINDOW_STEPS
        self.due = step < FIRST_STEPS or self._begin <= step < end
        self.near = step <= FIRST_STEPS or self._begin - 1 <= step <= end

    def next_step(self, step: int) -> int:
        """Return the first step after ``step`` about which something is to be decided."""
        return step + 1 if self.near else max(step + 1, self._begin - 1)


class Check(Listener):
    """Compares facts of one kind as a run goes on, and reports those that contradict each other.

    What is compared on a device is copied from there without waiting; the report follows when the copy has
    arrived. One that ``is_windowed`` gets events of observed steps and of the steps beside them only.
    """

    is_windowed = True
    every_step = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        self.run, self.schedule = run, schedule
        self._reports: Counter[str] = Counter()

    @property
    def reads_gradients(self) -> bool:
        """Whether this step is observed, or one beside it."""
        return self.schedule.near

    @property
    def due(self) -> bool:
        """Whether this step is observed; while several threads train, weights change at any time."""
        return self.schedule.due and not self.run.hub.training.missed

    def forget(self) -> None:
        """Drop what waits for a later event: the next events are not delivered."""

    def report(self, rule: str, step: int, **facts: Any) -> None:
        """Record a contradiction."""
        case = f"{rule} {facts.get('kind', '')}"
        self._reports[case] += 1
        if self._reports[case] <= MAX_REPORTS:
            self.run.notifier.event(KIND, {"rule": rule, **facts}, step)
            self.run.fact(rule)

    def when_known(self, values: torch.Tensor, then: Callable[[NDArray[np.generic]], None]) -> None:
        """Call ``then`` with the host copy of ``values`` as soon as it is there."""
        self.schedule.copies.add(values, then)

    def name(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter, empty where the table does not hold it."""
        table = self.run.scope.table
        row = table.row(parameter)
        return "" if row is None else table.records[row].name
