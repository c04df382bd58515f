"""Batch norms whose weights are frozen and whose running statistics change with every batch."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.modules import holding, kind_of, walk
from backlight.capture.optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.module_modes import is_batch_norm
from backlight.monitors.correctness.instrument.samples import Snapshot, first_values, thinned
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules.module_modes import FrozenStatistics

LOOKS = 4
"""Looks, each at least a step after the one before, at which statistics have changed and weights have not."""

MAX_NORMS = 8
"""Norms of a model that are compared, evenly over all."""

VALUES = 16
"""Values of each tensor that are compared."""


@dataclass
class _Look:
    """Weights and running means of frozen norms at the step of the last look, and how many agreed."""

    step: int
    names: tuple[str, ...]
    weights: Snapshot
    means: Snapshot
    agreed: int = 0


class NormStatistics(Check):
    """Compares frozen batch norms in training mode, of models that are trained, at observed steps.

    The weights of a momentum encoder change as well: it is not frozen.
    """

    name = "frozen_statistics"

    def _start(self) -> None:
        self._looks = weakref.WeakKeyDictionary[nn.Module, _Look]()

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Look at the models that the optimizer trains."""
        if self.due and self.run.scope.holds(optimizer):
            trained = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
            for model in holding(HUB.seen.roots(), trained):
                self._look(model)

    def _look(self, model: nn.Module) -> None:
        before = self._looks.get(model)
        if before is not None and before.step == self.step:
            return  # of another optimizer
        norms: list[tuple[str, Any]] = [(name, norm) for name, norm in walk(model) if _is_frozen(norm)]
        norms = list(thinned(norms, MAX_NORMS))
        if not norms:
            self._looks.pop(model, None)
            return
        weights = self.snapshot([first_values(norm.weight, VALUES) for _, norm in norms])
        means = self.snapshot([first_values(norm.running_mean, VALUES) for _, norm in norms])
        names = tuple(name for name, _ in norms)
        now = self._looks[model] = _Look(self.step, names, weights, means)
        if before is not None and before.names == names:
            self.when_known(functools.partial(self._compare, kind_of(model), before, now))

    def _compare(self, model: str, before: _Look, now: _Look) -> None:
        is_frozen = all(map(np.array_equal, before.weights.arrays, now.weights.arrays))
        if is_frozen and not any(map(np.array_equal, before.means.arrays, now.means.arrays)):
            now.agreed = before.agreed + 1
            if now.agreed == LOOKS:
                self.report(FrozenStatistics(now.step, model, Names.of(now.names)))


def _is_frozen(module: nn.Module) -> bool:
    """Return whether a batch norm with frozen weights updates its statistics."""
    if not is_batch_norm(module) or not module.training:
        return False
    return module.weight is not None and not module.weight.requires_grad
