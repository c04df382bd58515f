"""A tracker of steps that ends the script after as many as were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from backlight.capture.steps import StepTracker

if TYPE_CHECKING:
    import torch


class StopTraining(SystemExit):
    """Ends a script cleanly after the number of steps that was asked for; exit code 0."""


class LimitedTracker(StepTracker):
    """A tracker that asks its watch whether to go on, and tells it when it has been taken off."""

    check_limit: Callable[[], None]
    trouble: Callable[[Exception], None]

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """End the script instead, if it has had the steps that were asked for."""
        self.check_limit()
        super().backward_begin(roots)

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """End the script instead, where no backward was seen that could have."""
        if not self.in_step:
            self.check_limit()
        super().optimizer_begin(optimizer, has_closure=has_closure)

    def dropped(self, error: Exception) -> None:
        """Say once that nothing is measured any more."""
        self.trouble(error)
