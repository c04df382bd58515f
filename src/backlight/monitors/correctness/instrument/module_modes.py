"""The mode, training or evaluation, of the modules of a model that an optimizer trains."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from backlight.capture.modules import kind_of, named_parameters, walk
from backlight.capture.seen_optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import NAMED, Check

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

TRAINED_SHARE = 0.5
"""Share of the weights of a model that the optimizer holds, below which evaluation mode may be intended."""


class ModuleModes(Check):
    """``module_modes``: every dropout and trained batch norm of a model is in evaluation mode in training.

    A model that is mostly frozen is left out, as everything below a new head. Of a model whose root is in
    training mode the same is reported of a part that has dropout: batch norms alone are often frozen on
    purpose. It may be meant as well where weights come from a file, and only batch norms are concerned.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._rows: dict[int, int] | None = None
        self._models: list[weakref.ref[nn.Module]] = []
        self._modes: list[bool] = []
        self._has_changed = False  # since the first observed step

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the mode of each model; those of all its modules only at an observed step, or at a change."""
        scope = self.run.scope
        models = [model for reference in self._models if (model := reference()) is not None]
        if self._rows is not scope.table.rows or len(models) < len(self._models):
            self._rows, self._modes = scope.table.rows, []
            models = scope.roots({id(t) for t in scope.parameters()})
            self._models = [weakref.ref(model) for model in models]
        before, self._modes = self._modes, [model.training for model in models]
        is_change = bool(before) and before != self._modes
        self._has_changed = self._has_changed or is_change
        if not (self.due or (is_change and not all(self._modes))) or not scope.holds(optimizer):
            return
        held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
        for model in models:
            own = {id(n.parameter): n.parameter.numel() for n in named_parameters(model)}
            trained = sum(numel for key, numel in own.items() if key in held)
            if trained and trained >= TRAINED_SHARE * sum(own.values()):
                self._report(model, held)

    def _report(self, model: nn.Module, held: set[int]) -> None:
        modules = list(walk(model))
        relevant = [
            (name, module)
            for name, module in modules
            if is_dropout(module) or (is_batch_norm(module) and id(module.weight) in held)
        ]
        if not relevant or any(module.training for _, module in relevant):
            return
        drops = any(is_dropout(module) for _, module in relevant)
        part = ""
        if model.training:
            # The outermost module that was put into evaluation mode, with all that may be.
            names = [name for name, module in modules if not module.training]
            part = next((n for n in names if all(one.startswith(f"{n}.") for one, _ in relevant)), "")
            if not drops or not part:
                return
        is_loaded = self.schedule.loaded.holds(named.parameter for named in named_parameters(model))
        self.report(
            "module_modes",
            self.run.clock.index,
            kind="trained_in_evaluation",
            model=kind_of(model),
            part=part,
            may_be_meant=bool(part) or (is_loaded and not drops and not self._has_changed),
            modules=[name for name, _ in relevant[:NAMED]],
            kinds=kinds_of(relevant),
            dropouts=sum(is_dropout(module) for _, module in relevant),
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
