"""A step sink that stores clones of what a step tracker passes to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope
from backlight.capture.step_sink import StepSink, StepSummary
from backlight.capture.steps import StepTracker
from backlight.session.step_scalars import StepRow, StepScalars


@dataclass
class Sink(StepSink):
    """Implements ``StepSink``; ``grads`` holds one dictionary by parameter name per step."""

    scope: Scope
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    summaries: list[StepSummary] = field(default_factory=list)
    collections: int = 0
    updates: int = 0
    error: Exception | None = None
    every_step: StepScalars = field(default_factory=StepScalars)

    @property
    def scalars(self) -> StepScalars:
        return self.every_step

    def step_opens(self, index: int) -> bool:
        self.grads.append({})
        return True

    def collect(
        self, parameters: Sequence[Tensor], scale: Tensor | float | None, summary: StepSummary
    ) -> None:
        self.collections += 1
        if self.error is not None:
            raise self.error
        for parameter in parameters:
            name = self.scope.table.records[self.scope.table.row(parameter)].name
            grad = None if parameter.grad is None else parameter.grad.detach().clone()
            if grad is not None and scale is not None:
                grad = grad / scale
            assert name not in self.grads[-1], f"{name} was collected twice in one step"
            self.grads[-1][name] = grad

    def update_begins(self, parameters: Sequence[Tensor]) -> None:
        self.updates += 1

    def step_closes(self, summary: StepSummary) -> None:
        self.summaries.append(summary)
        self.scalars.close(summary.index)

    def of_steps(self, name: str) -> list[float]:
        """Return a scalar of every step that has it."""
        rows = [StepRow(*row).scalars() for row in self.scalars.queue]
        return [row[name] for row in rows if name in row]


@contextmanager
def tracking(
    *, models: Sequence[torch.nn.Module] = (), optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Iterator[Sink]:
    scope = Scope(models, optimizers)
    sink = Sink(scope)
    tracker = StepTracker(scope, sink)
    tracker.raised = []
    tracker.dropped = tracker.raised.append
    tracker.start()
    if not optimizers:
        HUB.optimizers.scan()
    try:
        yield sink
    finally:
        tracker.finish()
    if sink.error is None:
        assert not tracker.raised, tracker.raised
