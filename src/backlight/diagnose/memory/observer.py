"""Watch a script's memory: let some steps pass, record the next, then end the script."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from backlight.capture.events import Listener
from backlight.capture.forward import TrainedModels
from backlight.capture.hub import HUB
from backlight.capture.scope import Scope
from backlight.capture.steps import StepSummary, StepTracker
from backlight.diagnose.memory.allocator import Allocator, read_allocator, reset_allocator
from backlight.diagnose.memory.flop_counter import Counter
from backlight.diagnose.memory.logits import LogitsSeen
from backlight.diagnose.memory.recorder import Recorder
from backlight.records import Phase


class Observer(AbstractContextManager["Observer"]):
    """Entered before a script and left after it; ends the script when it has seen enough.

    Parameters
    ----------
    stop:
        Ends the script.
    warmup, steps:
        Steps to let pass, and steps to record after them.

    Attributes
    ----------
    recorder, counter, logits:
        What was recorded; None if the script ended before.
    recorded:
        Steps that were recorded to their end.
    seen:
        Steps in all.
    trouble:
        What is missing, and why.
    """

    def __init__(self, stop: Callable[[], None], warmup: int, steps: int) -> None:
        self.recorder: Recorder | None = None
        self.counter = Counter()
        self.logits: LogitsSeen | None = None
        self.allocator: Allocator | None = None
        self.recorded = self.seen = 0
        self.trouble: list[str] = []
        self._stop, self._warmup, self._steps = stop, warmup, steps
        self._scope = Scope()
        self.trained = TrainedModels(self._scope)
        self._tracker = _Tracker(self._scope, _Sink(self._closes))
        self._tracker.observer = self
        self._phases = _Phases(self)
        self._on = False

    def __enter__(self) -> Observer:
        """Attach."""
        HUB.add(self._tracker)
        HUB.add(self._phases)
        return self

    def __exit__(self, *exception: object) -> None:
        """Take everything off."""
        self._tracker.finish()
        self._end()
        HUB.remove(self._phases)
        HUB.remove(self._tracker)
        self.trained.leave()

    def phase(self, phase: Phase) -> None:
        """A phase of the step begins."""
        if self._on and self.recorder is not None:
            self.recorder.phase(phase)

    def name_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the state that an optimizer's step has made."""
        if self._on and self.recorder is not None:
            self.recorder.optimizer(optimizer)

    def _closes(self, summary: StepSummary) -> None:
        self.seen += 1
        if self._on:
            self.recorded += 1
            if self.recorded == self._steps:
                self._end()
                self._stop()
        elif self.seen == self._warmup and self.recorder is None:
            self._begin()

    def _begin(self) -> None:
        self.recorder = Recorder(self.trained.models, self.counter, _device(self.trained.models))
        self.logits = LogitsSeen(self.recorder)
        self.counter.softmax = self.logits.see
        reset_allocator()
        self.recorder.__enter__()
        self._on = True
        for optimizer in self._scope.optimizers():
            self.recorder.optimizer(optimizer)
        self.recorder.held(_tensors())
        self.recorder.begin_steps()
        self.recorder.phase(Phase.OTHER)

    def _end(self) -> None:
        if not self._on or self.recorder is None:
            return
        self._on = False
        if _get_current_dispatch_mode() is self.recorder:
            self.recorder.__exit__(None, None, None)
        else:
            # The script has entered a mode of its own around the end of the step, and will leave it.
            self.recorder.trouble = self.recorder.trouble or "a dispatch mode of the script lies over ours"
        self.allocator = read_allocator()
        if self.recorder.trouble:
            self.trouble.append(self.recorder.trouble)

    def lost(self, error: Exception) -> None:
        """Something of ours failed."""
        self.trouble.append(f"following the steps stopped after {type(error).__name__}: {error}")


class _Tracker(StepTracker):
    """Tells when the models may be known."""

    observer: Observer

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self.observer.trained.of_optimizer(optimizer)

    def backward_end(self) -> None:
        super().backward_end()
        self.observer.trained.of_scope()

    def dropped(self, error: Exception) -> None:
        self.observer.lost(error)


class _Phases(Listener):
    """Tells the recorder of phases; comes after the tracker, so that a new step has begun."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._backward = False

    def batch_begin(self, source: int) -> None:
        self._observer.phase(Phase.DATA)

    def batch(self, index: int, seconds: float) -> None:
        self._observer.phase(Phase.OTHER)

    def batch_missing(self) -> None:
        self._observer.phase(Phase.OTHER)

    def forward_begin(self) -> None:
        if not self._backward:
            self._observer.phase(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)

    def forward_end(self) -> None:
        if not self._backward:
            self._observer.phase(Phase.LOSS if torch.is_grad_enabled() else Phase.OTHER)

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        self._backward = True
        self._observer.phase(Phase.BACKWARD)

    def backward_end(self) -> None:
        self._backward = False
        self._observer.phase(Phase.OTHER)

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        self._observer.phase(Phase.CLIP)

    def clip_end(self) -> None:
        self._observer.phase(Phase.OTHER)

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._observer.phase(Phase.OPTIMIZER)

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._observer.name_state(optimizer)
        self._observer.phase(Phase.OTHER)

    def dropped(self, error: Exception) -> None:
        self._observer.lost(error)


class _Sink:
    """Sends the end of each step to the observer, and asks for no gradients."""

    def __init__(self, closes: Callable[[StepSummary], None]) -> None:
        self._closes = closes

    def step_opens(self, index: int) -> bool:
        return True

    def step_closes(self, summary: StepSummary) -> None:
        self._closes(summary)

    def collect(self, parameters: Sequence[torch.Tensor], scale: Any, moment: str) -> None:
        pass

    def update_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        pass

    def update_ends(self) -> None:
        pass

    def backward_ended(self, parameters: Sequence[torch.Tensor], index: int) -> None:
        pass

    def parameters_changed(self) -> None:
        pass


def _device(models: Sequence[nn.Module]) -> str:
    """Return the type of the device that holds most of the parameters."""
    sizes: dict[str, int] = {}
    for model in models:
        for parameter in model.parameters():
            sizes[parameter.device.type] = sizes.get(parameter.device.type, 0) + parameter.numel()
    return max(sizes, key=lambda device: sizes[device], default="cpu")


def _tensors() -> list[torch.Tensor]:
    # type() first: isinstance() on a stranger may run its __class__ property.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
