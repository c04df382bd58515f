"""Modules that a call which never came was to prepare: their own ``train()``, a first power iteration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of, walk
from backlight.capture.seen_optimizers import parameters_of
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.user_code import definition

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

ESTIMATED = 0.5
"""Share of its norm that a weight's vector has along its power iteration, below which none has run: after one
iteration it is 1, and of two random vectors near 0."""

NORMS = 8
"""Spectral norms that are read."""


class UnpreparedModules(Check):
    """``module_modes``: kinds ``train_not_called`` and ``random_spectral_norm``.

    The first: a class freezes parameters, or puts modules into evaluation mode, in a ``train`` of its own; it
    was never called, and nothing below the module is frozen, or in evaluation mode. The second: a model with
    ``torch.nn.utils.spectral_norm`` is evaluated before a forward in training mode has run the iteration.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._table: ParameterTable | None = None
        self._depth = self._evaluations = 0

    # Events

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Look once at the classes of each model that is trained."""
        if self._table is self.run.scope.table or not self.due:
            return
        self._table = self.run.scope.table
        held = {id(p) for p in parameters_of(optimizer)}
        for model in self.run.scope.roots(held):
            for name, module in walk(model):
                if type(module).train is not nn.Module.train and HUB.seen.is_modeless(module):
                    self._report_train(name, module)

    def forward_begin(self) -> None:
        """Count the calls that are in progress: one may be inside the other."""
        self._depth += 1

    def forward_end(self) -> None:
        """Count them."""
        self._depth = max(self._depth - 1, 0)

    def forward_inputs(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the spectral norms of a model at its first evaluations, and then at ever fewer."""
        if self._depth == 1 and not module.training and not is_capturing_graph() and not is_transforming():
            self._evaluations += 1
            if self._evaluations & (self._evaluations - 1) == 0:
                self._compare_norms(module)

    # Comparisons

    def _report_train(self, name: str, module: nn.Module) -> None:
        own = type(module).train
        if not isinstance(own, FunctionType) or "train" not in own.__code__.co_names:
            return  # one that does not call that of its base class leaves no trace
        called = names_in(own.__code__, type(module))
        parameters, below = list(module.parameters()), [m for m in module.modules() if m is not module]
        does = []
        if called & {"requires_grad", "requires_grad_"} and all(p.requires_grad for p in parameters):
            does.append("freezes parameters")
        if "eval" in called and all(m.training for m in below):
            does.append("puts modules into evaluation mode")
        if does and parameters:
            facts = {
                "model": kind_of(module),
                "modules": [name],
                "does": does,
                "line": str(definition(own) or ""),
            }
            self.report("module_modes", self.run.clock.index, kind="train_not_called", **facts)

    def _compare_norms(self, model: nn.Module) -> None:
        found = [
            (name, hook, module)
            for name, module in walk(model)
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, SpectralNorm)
        ][:NORMS]
        if not found:
            return
        with torch.no_grad():
            shares = []
            for _, hook, module in found:
                weight = hook.reshape_weight_to_matrix(getattr(module, f"{hook.name}_orig"))
                u, v = (getattr(module, f"{hook.name}_{one}") for one in "uv")
                image = torch.mv(weight, v)
                shares.append(torch.dot(u, image) / image.norm().clamp(min=1e-30))
        names, step, kind = [name for name, *_ in found], self.run.clock.index, kind_of(model)

        def report(*values: NDArray[np.generic]) -> None:
            random = [name for name, one in zip(names, values, strict=True) if abs(float(one)) < ESTIMATED]
            if random:
                facts = {"model": kind, "modules": random[:NAMED], "count": len(random)}
                self.report("module_modes", step, kind="random_spectral_norm", **facts)

        self.when_known(report, *shares)


def names_in(code: CodeType, owner: type) -> set[str]:
    """Return the names that a method uses, and those of the methods of ``owner`` that it names."""
    names = set(code.co_names)
    for name in code.co_names:
        method = inspect.getattr_static(owner, name, None)
        if isinstance(method, FunctionType) and not method.__module__.startswith("torch."):
            names |= set(method.__code__.co_names)
    return names
