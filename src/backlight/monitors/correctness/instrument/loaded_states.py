"""States that are loaded while a script trains: the module's own, or the same one again and again."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled, thinned
from backlight.monitors.correctness.rules.restored_state import OtherState, OwnState
from backlight.monitors.correctness.rules.weight_changes import StepsUndone
from backlight.user_code import user_line

MAX_PARAMETERS = 8
"""Trained parameters of a state that are compared, evenly over it."""

VALUES = 64
"""Values of each that are compared."""

CUT = 0.5
"""Share of a learning rate to which a plateau cuts it; a schedule lowers it less in between."""

UNDONE = 2
"""Times in a row that the same weights come back, from which on that is reported."""


class OwnStates(Check):
    """Reports ``load_state_dict`` of a module's own tensors: it changes nothing.

    Before the first step that may serve to run hooks. Distributed checkpoints are read into the tensors of a
    state, which is then loaded. Of a line that also loads other states, as a population may load the best of
    its members, nothing is reported.
    """

    name = "own_states"
    steps = "all"

    def _start(self) -> None:
        self._is_own = False
        self._lines: set[str] = set()  # that have loaded a module's own state

    def own_state_loaded(self, module: nn.Module) -> None:
        """Note it until the state follows."""
        self._is_own = True

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Compare the state with the tensors of the module."""
        is_own, self._is_own = self._is_own, False
        if not self.run.clock.done or HUB.own_passes or "torch.distributed.checkpoint" in sys.modules:
            return
        line = str(user_line() or "")
        if is_own and line:
            self._lines.add(line)
            self.report(OwnState(self.step, kind_of(module), line))
        elif line in self._lines:
            self._lines.remove(line)
            self.report(OtherState(self.step, line))


@dataclasses.dataclass
class _Begin:
    """Weights that a line has loaded, with which ``optimizer`` has gone on from ``step``."""

    line: str
    step: int
    optimizer: weakref.ref[Optimizer]
    rates: list[float]
    weights: Snapshot
    undone: int = 0


class UndoneSteps(Check):
    """``weights_unchanged``: a line loads the same weights again and again, and training begins from there.

    The optimizer is the same one, its rate was not cut, and no other state was loaded into it: a new fold, a
    new task and a plateau begin anew on purpose. What is loaded and replaced before the next
    step, as an average for an evaluation, undoes nothing.
    """

    name = "undone_steps"
    steps = "all"

    def _start(self) -> None:
        self._pending: tuple[weakref.ref[nn.Module], str] | None = None
        self._begins: weakref.WeakKeyDictionary[nn.Module, _Begin] = weakref.WeakKeyDictionary()

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Note the last state before a step."""
        if not HUB.own_passes:
            self._pending = weakref.ref(module), str(user_line() or "")

    def optimizer_loaded(self, optimizer: Optimizer, state: Any, result: Any) -> None:
        """Training begins anew with this state."""
        self._begins.clear()

    def optimizer_begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Compare the weights that were loaded with those of the time before."""
        if self._pending is None or not self.run.scope.holds(optimizer):
            return
        (reference, line), self._pending = self._pending, None
        trained, module = {id(p) for p in parameters_of(optimizer)}, reference()
        loaded = [p for p in module.parameters() if id(p) in trained] if module is not None else []
        plain = [part for p in loaded if (part := local(p)).numel() and not p.is_meta]
        if module is None or 2 * len(loaded) < len(trained) or not plain:
            return
        rates = [rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), float)]
        weights = self.snapshot([sampled(part, VALUES) for part in thinned(plain, MAX_PARAMETERS)])
        now = _Begin(line, self.step, weakref.ref(optimizer), rates, weights)
        before, self._begins[module] = self._begins.get(module), now
        is_same = before is not None and before.line == line and before.optimizer() is optimizer
        if before is None or not is_same or self.step == before.step:
            return
        if any(rate <= CUT * earlier for earlier, rate in zip(before.rates, rates, strict=False)):
            return
        has_state = any(
            isinstance(value, Tensor) and value.ndim
            for state in optimizer.state.values()
            for value in state.values()
        )
        fact = StepsUndone(self.step, kind_of(module), self.step - before.step, 0, has_state, line)
        self.when_known(functools.partial(self._compare, before, now, fact))

    def _compare(self, before: _Begin, now: _Begin, fact: StepsUndone) -> None:
        first, last = before.weights.arrays, now.weights.arrays
        if [x.tobytes() for x in first] == [x.tobytes() for x in last]:
            now.undone = before.undone + 1
            if now.undone == UNDONE:
                self.report(dataclasses.replace(fact, times=now.undone))
