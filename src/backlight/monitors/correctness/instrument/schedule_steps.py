"""When a script takes the steps of a learning rate schedule."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR, StepLR

from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loader_batches import length
from backlight.monitors.correctness.rules.schedule_steps import BeforeOptimizer, PerBatch

DECAY = 1e-3
"""Share of the first learning rate, below which a schedule has ended."""


class ScheduleSteps(Check):
    """Counts the steps of schedules and optimizers, and where the loader is in its epoch.

    Schedules are counted from scratch: none of it is evidence where a state was loaded.
    """

    name = "schedule_steps"
    is_windowed = False

    def _start(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of schedules
        self._reported: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizer_steps = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._epoch: tuple[int, int, int] | None = None  # sampler, batches, and number of the batch
        self._epochs: dict[int, int] = {}
        self._has_loaded = False

    def state_loaded(self, module: torch.nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Earlier steps of the schedule may be made up for."""
        self._has_loaded = True

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note how far the epoch is."""
        sampler = getattr(iterator, "_index_sampler", None)
        if index == 0:
            self._epochs[id(sampler)] = self._epochs.get(id(sampler), 0) + 1
        self._epoch = id(sampler), length(sampler), index

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Count, and compare with the schedules that were there first."""
        self._count(optimizer)

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A step that the scaler skips is one that the script takes."""
        if not self._optimizer_steps.get(optimizer, 0):
            self._count(optimizer)
            self._optimizer_steps[optimizer] = 0

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        steps = self._optimizer_steps.get(optimizer, 0)
        self._optimizer_steps[optimizer] = steps + 1
        if steps or optimizer in self._reported:
            return
        self._reported.add(optimizer)
        early = [s for s, count in self._steps.items() if s.optimizer is optimizer and count == 1]
        if early and not self._has_loaded and self.run.scope.holds(optimizer):
            self.report(BeforeOptimizer(self.step, type(early[0]).__name__))

    def schedule_end(self, schedule: Any) -> None:
        """Compare the schedule with the epoch."""
        steps = self._steps[schedule] = self._steps.get(schedule, 0) + 1
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
