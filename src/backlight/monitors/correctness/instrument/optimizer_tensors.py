"""The tensors that backward reached, compared with those that optimizers hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from backlight.capture.hub import HUB, parameters_of
from backlight.capture.modules import holding, kind_of, named_parameters, walk
from backlight.monitors.correctness.instrument.check import NAMED, Check

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

LOOKS = 4
"""Times that all modules are looked at: what an optimizer holds rarely changes."""


class OptimizerTensors(Check):
    """``unregistered_modules`` and ``optimizer_of_other_tensors``: gradients that no optimizer can use."""

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._left = LOOKS
        self._has_backward = False
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # at the last look

    def backward_end(self) -> None:
        """Gradients are there."""
        self._has_backward = True

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what this optimizer holds with the gradients of live modules."""
        has_backward, self._has_backward = self._has_backward, False
        is_plain = has_backward and not has_closure and not HUB.backward_depth
        if not (self.due and self._left and is_plain and self.run.scope.holds(optimizer)):
            return
        self._left -= 1
        own = parameters_of(optimizer)
        held = {id(p) for one in HUB.optimizers.known() for p in parameters_of(one)}
        step = self.run.clock.index
        for model in holding(HUB.seen.roots(), {id(p) for p in own}):
            lost = [(name, module) for name, module in unregistered(model) if trained(module, held)]
            if lost:
                names = [name for name, _ in lost]
                facts = {"model": kind_of(model), "modules": names[:NAMED], "count": len(names)}
                self.report("unregistered_modules", step, **facts, kind=kind_of(lost[0][1]))
        if all(p.grad is None for p in own):
            self._look_for_the_trained_model(optimizer, held, step)

    def _look_for_the_trained_model(
        self, optimizer: torch.optim.Optimizer, held: set[int], step: int
    ) -> None:
        HUB.seen.scan()  # a copy registers nothing
        shapes = {tuple(p.shape) for p in parameters_of(optimizer)}
        before, self._gradients = self._gradients, {}
        for model in HUB.seen.roots():
            others = trained(model, held)
            for parameter in others:
                if (gradient := parameter.grad) is not None:
                    self._gradients[id(parameter)] = (weakref.ref(gradient), gradient._version)
            # Models of an earlier run may be around, with the gradients that they had.
            is_new = any(
                (old := before.get(id(p))) is not None
                and (old[0]() is not p.grad or old[1] != p.grad._version)
                for p in others
                if p.grad is not None
            )
            if is_new and {tuple(p.shape) for p in others} <= shapes:
                facts = {"optimizer": type(optimizer).__name__, "model": kind_of(model), "count": len(others)}
                self.report("optimizer_of_other_tensors", step, **facts)
                return


def trained(module: nn.Module, held: set[int]) -> list[torch.Tensor]:
    """Return the parameters that have a gradient and that no optimizer holds."""
    found = [named.parameter for named in named_parameters(module)]
    return [p for p in found if p.requires_grad and p.grad is not None and id(p) not in held]


def unregistered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a model keeps in plain lists, tuples and dicts, each with its path."""
    known = {id(module) for _, module in walk(model)}
    for name, module in walk(model):
        for attribute, value in vars(module).items():
            items: Any = ()
            if not attribute.startswith("_") and isinstance(value, (list, tuple)):
                items = enumerate(value)
            elif not attribute.startswith("_") and isinstance(value, dict):
                items = value.items()
            for key, item in items:
                if issubclass(type(item), nn.Module) and id(item) not in known:
                    yield f"{name}.{attribute}[{key!r}]" if name else f"{attribute}[{key!r}]", item
