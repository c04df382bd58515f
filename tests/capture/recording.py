"""A step tracker that stores clones of what it collects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope
from backlight.capture.step_summary import StepSummary
from backlight.capture.steps import StepTracker
from backlight.session.step_scalars import StepRow, StepScalars


class Recording(StepTracker):
    """Records every step; ``grads`` holds one dictionary by parameter name per step."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.scalars = scope, StepScalars()
        super().__init__(scope, self.scalars)
        self.grads: list[dict[str, Tensor | None]] = []
        self.summaries: list[StepSummary] = []
        self.raised: list[Exception] = []
        self.collections = self.updates = 0
        self.error: Exception | None = None

    def dropped(self, error: Exception) -> None:
        self.raised.append(error)

    def step_opens(self, index: int) -> bool:
        self.grads.append({})
        return True

    def collect(self, parameters: Sequence[Tensor], scale: Tensor | float | None) -> None:
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
) -> Iterator[Recording]:
    tracker = Recording(Scope(models, optimizers))
    tracker.start()
    if not optimizers:
        HUB.optimizers.scan()
    try:
        yield tracker
    finally:
        tracker.finish()
    if tracker.error is None:
        assert not tracker.raised, tracker.raised
