"""Observer of a script's training steps, for commands that end the script once they have what they need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from backlight.capture.forward import TrainedModels
from backlight.capture.parameters import Scope
from backlight.capture.steps import StepSummaries, StepSummary, StepTracker


class StepObserver(AbstractContextManager[Any]):
    """Follows the steps and the models of a script; enter it before the script and leave it afterwards.

    Parameters
    ----------
    stop:
        Ends the script.

    Attributes
    ----------
    trained:
        The models that the script trains.
    trouble:
        What is missing, and why.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.scope = Scope()
        self.trained = TrainedModels(self.scope)
        self.trouble: list[str] = []
        self._stop = stop
        self._tracker = _Tracker(self)

    def on_step_end(self, summary: StepSummary) -> None:
        """Handle the end of a step."""

    def on_finish(self) -> None:
        """Handle the end of the script; the hooks are still attached."""

    def __enter__(self) -> Self:
        """Attach."""
        self._tracker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Detach everything."""
        self._tracker.finish()
        self.on_finish()
        self.trained.leave()


class _Tracker(StepTracker):
    """A step tracker that also finds the models; it measures no gradients."""

    def __init__(self, observer: StepObserver) -> None:
        super().__init__(observer.scope, StepSummaries(observer.on_step_end))
        self._observer = observer

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        # Now, so that the first forward of its model is followed.
        self._observer.trained.of_optimizer(optimizer)

    def backward_end(self) -> None:
        super().backward_end()
        self._observer.trained.of_scope()

    def dropped(self, error: Exception) -> None:
        self._observer.trouble.append(f"following the steps stopped after {type(error).__name__}: {error}")
