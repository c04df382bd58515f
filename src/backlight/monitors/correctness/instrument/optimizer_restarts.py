"""Optimizers that are created anew for the same parameters, without the state of the one before."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import (
    UNRELATED,
    Snapshot,
    cosine,
    sampled,
    thinned,
)
from backlight.monitors.correctness.rules.trained_tensors import StateLost
from backlight.user_code import user_line

RESTARTS = 2
"""Times that an optimizer starts without the state of the one before, from which on that is reported."""

STEPS = 4
"""Steps that make an optimizer more than a trial: a search for the batch size takes three with each."""

BRIEF = 16
"""The same for optimizers of a single step each: a search takes several, and ends sooner."""

MAX_PARAMETERS = 12
"""Matrices that are followed, evenly over the parameters."""

VALUES = 64
"""Values of each that are compared."""

Key = tuple[int, ...]
"""Parameters by ``id``."""


@dataclass(frozen=True)
class _Made:
    """A new optimizer: its settings and line, and whether one of the same parameters had taken steps."""

    settings: tuple[Any, ...]
    line: str
    follows: bool


@dataclass
class _Holder:
    """The optimizer of some parameters that took the last step, and how often a state was lost."""

    optimizer: weakref.ref[Optimizer]
    first: weakref.ref[Tensor]
    made: _Made | None
    begin: int
    weights: Snapshot | None
    restarts: int = 0
    brief: int = 0  # restarts after a single step
    has_state: bool = False


class OptimizerRestarts(Check):
    """Counts how often an optimizer starts anew, with the same settings, after steps of the one before.

    Two that alternate, one without a state, and what follows loaded weights, such as a client of federated
    learning, or weights that were initialised again, as for each fold, are left out. So is L-BFGS, whose
    closure evaluates: its restarts are meant.
    """

    name = "optimizer_restarts"
    steps = "all"

    def _start(self) -> None:
        self._made = weakref.WeakKeyDictionary[Optimizer, _Made]()
        self._keys = weakref.WeakKeyDictionary[Optimizer, Key]()
        self._holders: dict[Key, _Holder] = {}
        self._last: Optimizer | None = None  # in its first step

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Note its settings, and whether it comes after another one."""
        key = tuple(map(id, parameters_of(optimizer)))
        groups = tuple(
            tuple((k, v) for k, v in group.items() if _is_plain(v)) for group in optimizer.param_groups
        )
        follows = key in self._holders
        line = str(user_line() or "") if follows else ""
        self._made[optimizer] = _Made((type(optimizer), groups), line, follows)

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Training begins anew with other weights."""
        self._holders.clear()

    def optimizer_begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Compare a first step with the optimizer that the parameters had before."""
        key = self._keys.get(optimizer)
        if key is not None:
            holder = self._holders.get(key)
            if holder is not None and holder.optimizer() is not optimizer:  # they alternate
                holder.restarts, holder.made = 0, None
            return
        params = parameters_of(optimizer)
        if not params or not self.run.scope.holds(optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            return
        key = self._keys[optimizer] = tuple(map(id, params))
        made, before = self._made.get(optimizer), self._holders.get(key)
        now = _Holder(weakref.ref(optimizer), weakref.ref(params[0]), made, self.step, self._read(params))
        self._holders[key], self._last = now, optimizer
        if before is None or before.first() is not params[0]:
            return
        if before.made is None or made is None:  # made in a stretch that is not observed
            now.brief = before.brief
            return
        is_same = made.follows and made.settings == before.made.settings
        steps = self.step - before.begin
        if is_same and before.has_state and not optimizer.state and (steps >= STEPS or steps == 1):
            name = type(optimizer).__name__
            compare = functools.partial(self._compare, before, now, name, self.step, is_brief=steps == 1)
            self.when_known(compare)

    def _read(self, params: Sequence[Tensor]) -> Snapshot | None:
        """Return samples of some matrices; None where there is none to read."""
        matrices = [p for p in params if p.ndim > 1 and not p.is_meta and local(p).numel()]
        if not matrices or is_capturing_graph():
            return None
        return self.snapshot([sampled(local(p), VALUES) for p in thinned(matrices, MAX_PARAMETERS)])

    def _compare(self, before: _Holder, now: _Holder, name: str, step: int, *, is_brief: bool) -> None:
        """Count a restart, unless the weights have been initialised again, as for the next fold."""
        first = before.weights.arrays if before.weights is not None else []
        last = now.weights.arrays if now.weights is not None else []
        if [x.size for x in first] == [x.size for x in last] and first:
            cosines = list(map(cosine, first, last))
            is_equal = all(np.array_equal(a, b) for a, b in zip(first, last, strict=True))
            if is_equal or max(cosines) < UNRELATED:
                return
        now.restarts, now.brief = before.restarts + (not is_brief), before.brief + is_brief
        brief = now.brief
        is_reported = (brief >= BRIEF and not brief & (brief - 1)) if is_brief else now.restarts >= RESTARTS
        if is_reported and now.made is not None:
            self.report(StateLost(step, name, now.made.line, brief if is_brief else now.restarts))

    def optimizer_end(self, optimizer: Optimizer) -> None:
        """Note after its first step whether it has a state to lose."""
        if self._last is not None:
            self._last = None
            if (holder := self._holders.get(self._keys.get(optimizer, ()))) is not None:
                states = optimizer.state.values()
                holder.has_state = any(
                    isinstance(value, Tensor) and value.ndim > 0 for s in states for value in s.values()
                )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))
