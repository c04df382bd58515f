"""Evaluations of copies that follow the weights of a model: their updates, statistics and vectors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim.swa_utils import AveragedModel

from backlight.capture.call_hooks import CallHooks
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of, named_parameters, walk
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.module_modes import (
    initial_norms,
    is_batch_norm,
    statistics_of,
)
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled, thinned
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules.module_modes import AverageStatistics, SpectralVector
from backlight.monitors.correctness.rules.weight_changes import AverageNeverUpdated

MODULES = 8
"""Weights, batch norms and spectral norms of a copy that are read."""

VALUES = 64
"""Values of each weight that are compared."""

LENGTH_ERROR = 0.02
"""Error of the length of a vector of spectral norm, which is 1 but for rounding."""

MAX_COPIES = 64
"""Copies that are followed."""


@dataclass(frozen=True)
class _Copy:
    """The wrapper that a copy belongs to, or the copy itself, and the trained model that it is one of."""

    owner: weakref.ref[nn.Module]
    source: weakref.ref[nn.Module]


@dataclass
class _Evaluated:
    """What the first evaluation of a copy had, and the last one that was observed."""

    first_step: int
    last_step: int
    first_weights: Snapshot
    last_weights: Snapshot
    is_changed: bool = False


def _begin(module: nn.Module, args: Any, kwargs: Any) -> None:
    HUB.emit("copy_begin", module)


class Averages(Check):
    """Observes models of the same parameter names as a trained one, of which no optimizer holds a parameter.

    Random targets, teachers and reference models stay what they are: a copy counts as an average where its
    weights change between two evaluations, or where ``AveragedModel`` updates it.
    """

    name = "averages"
    steps = "all"

    def _start(self) -> None:
        self._hooks = CallHooks(_begin)
        self._changes = -1, -1
        self._updated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._copies: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._evaluated: weakref.WeakKeyDictionary[nn.Module, _Evaluated] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Report the averages that were never updated, which is known at the end: one may begin late."""
        for copy, evaluated in self._evaluated.items():
            owner = self._owner(copy)
            if isinstance(owner, AveragedModel) and copy not in self._updated:
                self.when_known(functools.partial(self._report_average, owner, evaluated), owner.n_averaged)
        self._hooks.leave()

    # Events

    def averaged(self, average: nn.Module, count: int) -> None:
        """Note the model of an average that is updated."""
        if not count and isinstance(average.module, nn.Module):
            self._updated.add(average.module)

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Follow the copies that there are now."""
        changes = HUB.seen.changes, HUB.seen.copied
        if not self.due or changes == self._changes or not self.run.scope.holds(optimizer):
            return
        self._changes = changes
        trained_ids = {id(p) for other in self.run.scope.optimizers() for p in parameters_of(other)}
        trained = {_names(root): root for root in self.run.scope.roots(trained_ids)}
        # The latest first: earlier ones may be about to go.
        for root in reversed((*HUB.seen.roots(), *HUB.seen.copied_roots())):
            for module in (root, *root.children()):
                names = _names(module) if len(self._copies) < MAX_COPIES else frozenset()
                if names and names in trained and not any(id(p) in trained_ids for p in module.parameters()):
                    self._copies[module] = _Copy(weakref.ref(root), weakref.ref(trained[names]))
                    self._hooks.follow([module])

    def copy_begin(self, module: nn.Module) -> None:
        """Observe the 1st, 2nd, 4th, 8th … evaluation of a copy."""
        if module.training or torch.is_grad_enabled() or HUB.backward_depth or not self.run.clock.done:
            return
        if not is_capturing_graph() and not is_transforming():
            count = self._calls[module] = self._calls.get(module, 0) + 1
            if count & (count - 1) == 0:
                self._observe(module)

    # Comparisons

    def _owner(self, copy: nn.Module) -> nn.Module:
        """Return the wrapper that a copy belongs to, the copy itself where there is none."""
        return (self._copies[copy].owner() if copy in self._copies else None) or copy

    def _observe(self, copy: nn.Module) -> None:
        parameters = [local(n.parameter) for n in named_parameters(copy)]
        if any(p.is_meta or p.layout is not torch.strided for p in parameters):
            return
        weights = self.snapshot([sampled(p, VALUES) for p in thinned(parameters, MODULES)])
        source = self._copies[copy].source() if copy in self._copies else None
        sources = {} if source is None else _norms(source)
        evaluated = self._evaluated.get(copy)
        if evaluated is None:
            evaluated = self._evaluated[copy] = _Evaluated(self.step, self.step, weights, weights)
        evaluated.last_step, evaluated.last_weights = self.step, weights
        norms = {n: m for n, m in _norms(copy).items() if not m.training and n in sources}
        names = list(norms)[:MODULES]
        values = statistics_of([norms[name] for name in names])
        statistics = self.snapshot(values) if values else None
        # Statistics that the trained model does not collect either are no loss.
        of_source = self.snapshot(statistics_of([sources[name] for name in names])) if values else None
        is_average, kind, step = copy in self._updated, kind_of(self._owner(copy)), self.step

        def report() -> None:
            evaluated.is_changed = evaluated.is_changed or not _are_equal(evaluated.first_weights, weights)
            if statistics is None or of_source is None or not (is_average or evaluated.is_changed):
                return
            also = initial_norms(names, of_source)
            if initial := [name for name in initial_norms(names, statistics) if name not in also]:
                self.report(AverageStatistics(step, kind, Names.of(initial)))

        self.when_known(report)
        self._observe_vectors(copy, kind)

    def _observe_vectors(self, copy: nn.Module, kind: str) -> None:
        """Read the lengths of the vectors of spectral norm, by either implementation of torch."""
        vectors = [
            (name.partition(".parametrizations")[0], vector)
            for name, module in walk(copy)
            for vector in (getattr(module, "_u" if isinstance(module, _SpectralNorm) else "weight_u", None),)
            if isinstance(vector, Tensor) and vector.ndim == 1
        ][:MODULES]
        step, names = self.step, [name for name, _ in vectors]

        def report(*lengths: NDArray[np.generic]) -> None:
            wrong = {n: float(v) for n, v in zip(names, lengths, strict=True) if abs(v - 1) > LENGTH_ERROR}
            if wrong:
                self.report(SpectralVector(step, kind, Names.of(list(wrong)), next(iter(wrong.values()))))

        if vectors:
            with torch.no_grad():
                self.when_known(report, *(vector.float().norm() for _, vector in vectors))

    def _report_average(
        self, average: nn.Module, evaluated: _Evaluated, n_averaged: NDArray[np.generic]
    ) -> None:
        is_repeated = evaluated.last_step > evaluated.first_step
        if is_repeated and not int(n_averaged) and not evaluated.is_changed:
            first, last = evaluated.first_step, evaluated.last_step
            self.report(AverageNeverUpdated(first, kind_of(average), last))


def _norms(model: nn.Module) -> dict[str, Any]:
    """Return the batch norms of a model, by their names without the prefix of a wrapper."""
    return {name.removeprefix("module."): module for name, module in walk(model) if is_batch_norm(module)}


def _names(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's parameters, without the prefix of a wrapper of ranks."""
    return frozenset(named.name.removeprefix("module.") for named in named_parameters(model))


def _are_equal(first: Snapshot, second: Snapshot) -> bool:
    pairs: Sequence[tuple[NDArray[np.generic], NDArray[np.generic]]]
    pairs = list(zip(first.arrays, second.arrays, strict=True))
    return all(np.array_equal(before, after) for before, after in pairs)
