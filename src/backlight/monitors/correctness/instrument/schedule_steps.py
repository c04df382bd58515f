"""When a script takes the steps of a learning rate schedule."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR, OneCycleLR, StepLR

from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loader_batches import length
from backlight.monitors.correctness.rules.schedule_steps import (
    BeforeOptimizer,
    PastEnd,
    PerBatch,
    PerEpoch,
    SeveralSteps,
    WrongDirection,
)

DECAY = 1e-3
"""Share of the first learning rate, below which a schedule has ended."""


EPOCHS = 2
"""Epochs, by the arguments of a schedule, after which its steps are compared with those of the optimizer."""

OBSERVED_SHARE = 0.5
"""Share of the steps of a run up to which a schedule that is gone by its end was observed, at least."""

TAKEN_SHARE = 0.25
"""Share of its steps above which a schedule that ends with the run is not one of epochs."""


CUTS = 2
"""Cuts of a learning rate before the direction of the metric that led to them is compared."""

MOVED = 0.2
"""Share of its first value by which a metric has moved in the other direction, at least."""

MAX_LENGTHS = 8
"""Schedules that are compared with what they were created for, the newest ones."""


@dataclass
class _Length:
    """Steps that a schedule was created for, in an epoch as well (0 if unknown), and when it was created.

    ``taken`` and ``updates`` are its steps and those of its optimizer as last observed: at the end of the
    run a schedule that a function has made is gone.
    """

    schedule: weakref.ref[Any]
    name: str
    steps: int
    in_epoch: int
    begin: int
    first: int
    taken: int = 0
    updates: int = 0


@dataclass
class _Plateau:
    """The first metric of a plateau schedule, its last learning rates, and how often it cut one."""

    first: float
    rates: list[Any]
    cuts: int = 0


class ScheduleSteps(Check):
    """Counts the steps of schedules and optimizers, and where the loader is in its epoch.

    Schedules are counted from scratch: none of it is evidence where a state was loaded.
    """

    name = "schedule_steps"
    steps = "all"

    def _start(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of schedules
        self._several: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reported: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizer_steps = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._plateaus = weakref.WeakKeyDictionary[Any, _Plateau]()
        self._lengths = deque[_Length](maxlen=MAX_LENGTHS)
        self._since: dict[int, tuple[int, int]] = {}  # steps since that of the optimizer, and before that
        self._epoch: tuple[int, int, int] | None = None  # sampler, batches, and number of the batch
        self._epochs: dict[int, int] = {}
        self._has_loaded = False

    def state_loaded(self, module: torch.nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Earlier steps of the schedule may be made up for."""
        self._has_loaded = True

    def schedule_made(self, schedule: Any, steps_per_epoch: int | None) -> None:
        """Note for how many steps it was created."""
        steps = getattr(schedule, "total_steps", getattr(schedule, "T_max", None))
        if isinstance(schedule, (CosineAnnealingLR, OneCycleLR)) and isinstance(steps, int):
            begin, first = self.step, schedule.last_epoch
            name, in_epoch = type(schedule).__name__, steps_per_epoch or 0
            self._lengths.append(_Length(weakref.ref(schedule), name, steps, in_epoch, begin, first))

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note how far the epoch is."""
        sampler = getattr(iterator, "_index_sampler", None)
        if index == 0:
            self._epochs[id(sampler)] = self._epochs.get(id(sampler), 0) + 1
        self._epoch = id(sampler), length(sampler), index

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Count, and compare with the schedules that were there first."""
        self._count(optimizer)
        for planned in list(self._lengths):
            schedule = planned.schedule()
            if schedule is None or schedule.optimizer is not optimizer or not self.run.scope.holds(optimizer):
                continue
            planned.taken, planned.updates = schedule.last_epoch - planned.first, self.step - planned.begin
            is_late = planned.in_epoch > 1 and planned.updates >= EPOCHS * planned.in_epoch
            if is_late and 0 < planned.taken <= planned.updates // planned.in_epoch:
                self._report_per_epoch(planned)

    def forget(self) -> None:
        """Compare at the end of the run: an optimizer took as many steps as a schedule was created for."""
        for planned in list(self._lengths):
            updates, schedule = self.run.clock.done - planned.begin, planned.schedule()
            if schedule is not None:
                planned.taken, planned.updates = schedule.last_epoch - planned.first, updates
            is_observed = planned.updates >= OBSERVED_SHARE * updates
            is_over = abs(updates - planned.steps) <= 1 and is_observed
            if is_over and 0 < planned.taken <= TAKEN_SHARE * planned.updates:
                self._report_per_epoch(planned)

    def _report_per_epoch(self, planned: _Length) -> None:
        self._lengths.remove(planned)
        if self.run.scope.alone() and not self._has_loaded:
            taken, updates = planned.taken, planned.updates
            self.report(PerEpoch(self.step, planned.name, taken, planned.steps, updates, planned.in_epoch))

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A step that the scaler skips is one that the script takes."""
        if not self._optimizer_steps.get(optimizer, 0):
            self._count(optimizer)
            self._optimizer_steps[optimizer] = 0

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        steps = self._optimizer_steps.get(optimizer, 0)
        self._optimizer_steps[optimizer] = steps + 1
        for schedule in [s for s in self._steps if s.optimizer is optimizer] if self._steps else ():
            now, before = self._since.get(id(schedule), (0, 0))
            self._since[id(schedule)] = (0, now)
            if now == before > 1 and schedule not in self._several:
                self._several.add(schedule)
                self.record(SeveralSteps(self.step, type(schedule).__name__, now, self.run.world_size))
            if now == before > 1:
                self._compare_end(schedule, now)
        if steps or optimizer in self._reported:
            return
        self._reported.add(optimizer)
        early = [s for s, count in self._steps.items() if s.optimizer is optimizer and count == 1]
        if early and not self._has_loaded and self.run.scope.holds(optimizer):
            self.report(BeforeOptimizer(self.step, type(early[0]).__name__))

    def _compare_end(self, schedule: Any, count: int) -> None:
        """Report a cosine that is past its minimum after several steps per step of the optimizer."""
        if schedule in self._reported or not isinstance(schedule, CosineAnnealingLR) or self._has_loaded:
            return
        taken, length = schedule.last_epoch, schedule.T_max
        if taken > length and self.run.scope.holds(schedule.optimizer):
            self._reported.add(schedule)
            name = type(schedule).__name__
            self.report(PastEnd(self.step, name, count, taken, length, self.run.world_size))

    def plateau_end(self, schedule: Any, metric: Any) -> None:
        """Compare the metrics with the first one, once they have cut the learning rate."""
        metric = float(metric)
        rates = [group["lr"] for group in schedule.optimizer.param_groups]
        plateau = self._plateaus.setdefault(schedule, _Plateau(metric, rates))
        is_cut, plateau.rates = rates != plateau.rates, rates
        if not is_cut or schedule in self._reported or self._has_loaded:
            return
        plateau.cuts += 1
        moved = (metric - plateau.first) * (-1 if schedule.mode == "max" else 1)
        is_best = schedule.best == plateau.first and moved > MOVED * abs(plateau.first)
        if plateau.cuts >= CUTS and is_best and self.run.scope.holds(schedule.optimizer):
            self._reported.add(schedule)
            name, mode = type(schedule).__name__, schedule.mode
            self.report(WrongDirection(self.step, name, mode, plateau.cuts, plateau.first, metric))

    def schedule_end(self, schedule: Any) -> None:
        """Compare the schedule with the epoch."""
        steps = self._steps[schedule] = self._steps.get(schedule, 0) + 1
        now, before = self._since.get(id(schedule), (0, 0))
        self._since[id(schedule)] = (now + 1, before)
        optimizer = schedule.optimizer
        if schedule in self._reported or self._epoch is None or self._has_loaded or steps < 2:
            return
        sampler, batches, index = self._epoch
        is_first = self._epochs.get(sampler) == 1 and index < batches - 1
        is_per_step = self._optimizer_steps.get(optimizer) == steps
        if not is_first or not is_per_step or not self.run.scope.holds(optimizer):
            return
        rate, first = optimizer.param_groups[0].get("lr"), schedule.base_lrs[0]
        has_ended = (
            issubclass(type(schedule), (ExponentialLR, MultiStepLR, StepLR))
            and isinstance(rate, float)
            and isinstance(first, float)
            and rate < DECAY * first
            and index < batches // 2
        )
        is_past = issubclass(type(schedule), CosineAnnealingLR) and schedule.last_epoch > schedule.T_max
        if has_ended or is_past:
            self._reported.add(schedule)
            name = type(schedule).__name__
            self.report(PerBatch(self.step, name, steps, batches, is_past, float(rate)))
