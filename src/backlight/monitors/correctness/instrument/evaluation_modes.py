"""What is active in a model while a script evaluates it: dropout, and which statistics of batch norm."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.capture.dropout_calls import DropoutCalls
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of, walk
from backlight.capture.seen_optimizers import parameters_of
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.monitors.correctness.instrument.module_modes import is_batch_norm, is_dropout, kinds_of

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

BATCHES = 2
"""Batches in a row without a backward that make an evaluation."""

NORMS = 8
"""Batch norms whose statistics are compared with the initial ones."""


class EvaluationModes(Check):
    """``module_modes``: forwards without gradients of a model that is being trained.

    ``evaluated_in_training``: the model is in training mode, and the batches come from a data set that no
    backward follows. Batches of the training set may serve to estimate statistics, and several forwards of
    one batch to sample from dropout. ``dropout_in_evaluation``: functional dropout, or that of attention,
    although every module is in evaluation mode. ``initial_statistics``: batch norms with trained weights,
    which are in training mode when it trains, use the statistics that they were built with.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._source = 0  # the data set of the last batch
        self._trained: set[int] = set()
        self._trained_norms: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._batches = 0  # of that data set, each with a forward, in a row and without a backward
        self._called: list[weakref.ref[nn.Module]] | None = []  # for the last batch; None with gradients
        self._evaluations = 0
        self._calls = DropoutCalls()
        self._model: nn.Module | None = None  # whose dropout is observed
        self._depth = 0

    # Events

    def batch_begin(self, source: int) -> None:
        """Count the batch before, whose backward would have come by now."""
        called = [module for one in self._called or () if (module := one()) is not None]
        is_once = len({id(module) for module in called}) == len(called)
        self._batches = self._batches + 1 if called and is_once else 0
        if self._batches == BATCHES and self._trained and self._source not in self._trained:
            self._report_training_mode(called)
        if source != self._source:
            self._batches = 0
        self._source, self._called = source, []

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """The last batch is one to learn from."""
        self._trained.add(self._source)
        self._called = None

    def forward_begin(self) -> None:
        """Count the calls that are in progress: one may be inside the other."""
        self._depth += 1

    def forward_inputs(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note which model is evaluated, and observe it at the first evaluations and then ever fewer."""
        if torch.is_grad_enabled():
            self._called = None
            if self._depth == 1 and self.schedule.due:
                self._trained_norms.update(m for _, m in walk(module) if is_batch_norm(m) and m.training)
        elif self._depth == 1 and self.run.clock.done and not HUB.backward_depth:
            if module.training:
                if self._called is not None:
                    self._called.append(weakref.ref(module))
            elif not is_capturing_graph() and not is_transforming():
                self._evaluations += 1
                if self._evaluations & (self._evaluations - 1) == 0:
                    self._observe(module)

    def forward_end(self) -> None:
        """Report the dropout of the forward that was observed."""
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and (model := self._model) is not None:
            self._model = None
            self._calls.stop()
            found, self._calls.found = self._calls.found, []
            for name, p, line in found[:1]:
                self._report(model, "dropout_in_evaluation", function=name, p=p, line=str(line or ""))

    # Comparisons

    def _observe(self, model: nn.Module) -> None:
        modules = [module for _, module in walk(model)]
        if not any(module.training for module in modules) and self._calls.start():
            self._model = model
        held = {id(p) for one in self.run.scope.optimizers() for p in parameters_of(one)}
        norms = [
            (name, module)
            for name, module in walk(model)
            if is_batch_norm(module)
            and module in self._trained_norms
            and not module.training
            and id(module.weight) in held
        ][:NORMS]
        if not norms:
            return
        statistics = [s for _, module in norms for s in (module.running_mean, module.running_var)]
        values = self.snapshot([s.reshape(-1) for s in statistics if s is not None])
        names, step, kind = [name for name, _ in norms], self.run.clock.index, kind_of(model)

        def report() -> None:
            pairs = zip(names, values.arrays[::2], values.arrays[1::2], strict=True)
            initial = [name for name, mean, variance in pairs if not mean.any() and (variance == 1).all()]
            if initial:
                facts = {"model": kind, "modules": initial[:NAMED], "count": len(initial)}
                self.report("module_modes", step, kind="initial_statistics", **facts)

        self.when_known(report)

    def _report_training_mode(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            active = [
                (name, module)
                for name, module in walk(model)
                if module.training and (is_dropout(module) or is_batch_norm(module))
            ]
            # Without a momentum, batch norm averages over all batches: statistics are being estimated.
            if active and all(getattr(module, "momentum", 0.0) is not None for _, module in active):
                facts = {
                    "modules": [name for name, _ in active[:NAMED]],
                    "kinds": kinds_of(active),
                    "dropouts": sum(is_dropout(module) for _, module in active),
                }
                self._report(model, "evaluated_in_training", **facts)

    def _report(self, model: nn.Module, kind: str, **facts: Any) -> None:
        self.report("module_modes", self.run.clock.index, kind=kind, model=kind_of(model), **facts)
