"""The tables of injected errors and of controls, and the loop that most of them change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from faults.injection import Fault, registrar
from faults.silent import habits

FAULTS: dict[str, Fault] = {}
"""Loops with an error that their argument injects."""

fault = registrar(FAULTS)

CONTROLS: dict[str, Callable[[], None]] = {}
"""Loops without an error that come close to one."""

STEPS = 10

EVALUATION_STEPS = 4
"""Steps between two evaluations of a loop that has some."""


def control(train: Callable[[], None]) -> Callable[[], None]:
    """Register a loop that has no error."""
    CONTROLS[train.__name__] = train
    return train


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(8, 4), torch.randint(0, 3, (8,))


def perceptron(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), *last)


def nothing(*_: Any) -> None:
    """Do nothing."""


class Loop:
    """A training loop with the habits in force. An error replaces one of its arguments or attributes.

    ``model`` may be a function of the modules ``parts``. An epoch iterates over ``loader``, or takes
    ``steps`` steps with what ``data(batches)`` returns: pairs of input and target, whose loss is
    ``loss_of(model(input), target)``. Further arguments are habits that this loop has in any case.

    Attributes
    ----------
    clear, unscale, update, evaluate:
        What clears gradients, divides them by the scale, takes the optimizers' step, and evaluates.
    before_epoch, after_epoch:
        Called with the number of the epoch.
    before_step, before_microbatch, before_backward, before_update, after_update, after_step:
        Called with the number of the step; ``before_microbatch`` after gradients were cleared,
        ``before_update`` after clipping, ``after_step`` when gradients were cleared.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *optimizers: torch.optim.Optimizer,
        loss_of: Callable[[Any, Any], Tensor] = F.cross_entropy,
        data: Callable[[int], Iterable[Any]] = batches,
        loader: Iterable[Any] | None = None,
        steps: int = STEPS,
        epochs: int = 1,
        parts: Sequence[nn.Module] = (),
        init_scale: float = 1024.0,
        **forced: Any,
    ) -> None:
        self.habits = dataclasses.replace(habits.current(), **forced)
        self.model, self.parts, self.loss_of = model, list(parts), loss_of
        self.parts = self.parts or [model]  # type: ignore[list-item]
        self.parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizers = list(optimizers) or [torch.optim.SGD(self.parameters, lr=0.1)]
        self.data, self.loader, self.steps, self.epochs, self.step = data, loader, steps, epochs, 0
        self.init_scale = init_scale
        self.clear: Callable[[], object] = self._clear
        self.unscale: Callable[[], object] = self._unscale
        self.update: Callable[[], object] = self._update
        self.evaluate: Callable[[], object] = self._evaluate
        self.before_epoch = self.after_epoch = nothing
        self.before_step = self.before_microbatch = self.before_backward = nothing
        self.before_update = self.after_update = self.after_step = nothing

    def run(self) -> None:
        """Train."""
        own = self.habits
        self.forward = self.model
        if own.is_compiled:
            torch._dynamo.reset()
            self.forward = torch.compile(self.model, backend="eager")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, enabled=own.has_scaler)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.99**step)
            for one in self.optimizers
            if own.has_schedule
        ]
        self.averages = [
            AveragedModel(part, avg_fn=lambda mean, new, _: torch.lerp(mean, new, 0.1))
            for part in self.parts
            if own.averages
        ]
        for epoch in range(self.epochs):
            self.before_epoch(epoch)
            self._train_epoch()
            self.after_epoch(epoch)

    def _train_epoch(self) -> None:
        count, number = self.habits.microbatches, 0
        for x, y in self.data(self.steps * count) if self.loader is None else self.loader:
            if not number:
                self.before_step(self.step)
                if self.habits.clears == "start":
                    self.clear()
            self.before_microbatch(self.step)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.habits.autocast):
                loss = self.loss_of(self.forward(x), y)
                loss = loss / count if count > 1 else loss
            self.before_backward(self.step)
            self.backward(loss)
            number = (number + 1) % count
            if not number:
                self._finish_step()
        if number:  # the last step of an epoch may have fewer microbatches
            self._finish_step()

    def backward(self, loss: Tensor) -> None:
        """Propagate a loss back."""
        self.scaler.scale(loss).backward()

    def _finish_step(self) -> None:
        own = self.habits
        if own.clips:
            self.unscale()
            if own.clips == "norm":
                nn.utils.clip_grad_norm_(self.parameters, 1.0)
            else:
                nn.utils.clip_grad_value_(self.parameters, 0.1)
        self.before_update(self.step)
        self.update()
        for schedule in self.schedules:
            schedule.step()
        for average, part in zip(self.averages, self.parts if self.averages else (), strict=True):
            average.update_parameters(part)
        self.after_update(self.step)
        if own.clears == "end":
            self.clear()
        self.after_step(self.step)
        if own.evaluates and self.step % EVALUATION_STEPS == EVALUATION_STEPS - 1:
            self.evaluate()
        self.step += 1

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.habits.sets_to_none)

    def _unscale(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

    def _update(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def _evaluate(self) -> None:
        modes = [[(one, one.training) for one in part.modules()] for part in self.parts]
        forward = self.averages[0] if self.averages and self.parts == [self.model] else self.forward
        with torch.no_grad():
            for part in (*self.parts, *self.averages):
                part.eval()
            for x, y in self.data(2):
                self.loss_of(forward(x), y)
        for one, mode in (pair for part in modes for pair in part):
            one.training = mode


def train(model: Callable[..., Any], *optimizers: torch.optim.Optimizer, **options: Any) -> None:
    """Train without an error of the loop."""
    Loop(model, *optimizers, **options).run()
