"""The mode, training or evaluation, of the modules of a model that an optimizer trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from backlight.capture.hub import HUB, parameters_of
from backlight.capture.modules import holding, kind_of, named_parameters, walk
from backlight.monitors.correctness.instrument.check import NAMED, Check

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

TRAINED_SHARE = 0.5
"""Share of the weights of a model that the optimizer holds, below which evaluation mode may be intended."""


class ModuleModes(Check):
    """``module_modes``: every dropout and trained batch norm of a model is in evaluation mode in training.

    A model whose root is in training mode, or that is mostly frozen, is left out: batch norms are often
    frozen on purpose, and so is everything below a new head.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._table: ParameterTable | None = None
        self._models: list[nn.Module] = []
        self._modes: list[bool] = []

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the mode of each model; those of all its modules only at an observed step, or at a change."""
        scope = self.run.scope
        if self._table is not scope.table:
            self._table = scope.table
            self._models = scope.models or holding(HUB.seen.roots(), {id(t) for t in scope.parameters()})
        before, self._modes = self._modes, [model.training for model in self._models]
        if all(self._modes) or not (self.due or before != self._modes) or not scope.holds(optimizer):
            return
        held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
        for model in self._models:
            if not model.training:
                own = {id(n.parameter): n.parameter.numel() for n in named_parameters(model)}
                trained = sum(numel for key, numel in own.items() if key in held)
                if trained and trained >= TRAINED_SHARE * sum(own.values()):
                    self._report(model, held)

    def _report(self, model: nn.Module, held: set[int]) -> None:
        relevant = [
            (name, module)
            for name, module in walk(model)
            if is_dropout(module) or (is_batch_norm(module) and id(module.weight) in held)
        ]
        if relevant and not any(module.training for _, module in relevant):
            self.report(
                "module_modes",
                self.run.clock.index,
                kind="trained_in_evaluation",
                model=kind_of(model),
                modules=[name for name, _ in relevant[:NAMED]],
                kinds=kinds_of(relevant),
            )


def is_dropout(module: nn.Module) -> TypeGuard[_DropoutNd]:
    """Return whether a module drops values in training mode."""
    return isinstance(module, _DropoutNd) and module.p > 0


def is_batch_norm(module: nn.Module) -> TypeGuard[_NormBase]:
    """Return whether a module keeps running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def kinds_of(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, int]:
    """Return how many modules there are of each class."""
    return dict(Counter(kind_of(module) for _, module in modules))
