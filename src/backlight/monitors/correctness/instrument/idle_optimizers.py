"""Optimizers whose parameters get gradients that the script clears again and again, and that take no step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from backlight.capture.hub import HUB
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import Snapshot, first_values, thinned
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules.trained_tensors import NeverStepped
from backlight.user_code import user_line

SPAN = 40
"""Steps of other optimizers during which an optimizer takes none, at least."""

LOOKS = 6
"""Observed steps with another gradient each time, at least."""

MAX_PARAMETERS = 12
"""Parameters of an optimizer that are followed, evenly over all."""

VALUES = 64
"""Values of each that show whether anything updates it."""


@dataclass
class _Idle:
    """Weights of an optimizer at the first look at ``begin``, and the gradients of the last look."""

    begin: int
    weights: Snapshot
    gradients: list[weakref.ref[torch.Tensor]]
    looks: int = 1


class IdleOptimizers(Check):
    """Compares the weights and gradients of optimizers without a state while others take steps.

    Gradients that are left over pile up in one tensor. Only where the script clears them, which makes another
    tensor of each, it means to use them.
    """

    name = "idle_optimizers"

    def _start(self) -> None:
        self._has_backward = False
        self._lines = weakref.WeakKeyDictionary[Optimizer, str]()
        self._idle = weakref.WeakKeyDictionary[Optimizer, _Idle]()
        self._stepped = weakref.WeakSet[Optimizer]()

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Note the line."""
        self._lines[optimizer] = str(user_line() or "")

    def backward_end(self) -> None:
        """Gradients are there."""
        self._has_backward = True

    def optimizer_begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Look at the optimizers that have never taken a step."""
        self._stepped.add(optimizer)
        self._idle.pop(optimizer, None)
        has_backward, self._has_backward = self._has_backward, False
        if not (self.due and has_backward and self.run.scope.holds(optimizer)):
            return
        others = [o for o in HUB.optimizers.existing() if o not in self._stepped and not o.state]
        if others:
            trained = {id(p) for o in self._stepped for p in parameters_of(o)}
            for other in others:
                self._look(other, [p for p in parameters_of(other) if id(p) not in trained])

    def _look(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
        followed = thinned([p for p in params if p.requires_grad and p.grad is not None], MAX_PARAMETERS)
        gradients = [p.grad for p in followed if p.grad is not None]
        if not gradients:
            return
        weights = self.snapshot([first_values(local(p), VALUES) for p in followed])
        references = [weakref.ref(gradient) for gradient in gradients]
        idle = self._idle.get(optimizer)
        is_cleared = (
            idle is not None
            and len(idle.gradients) == len(gradients)
            and not any(before() is now for before, now in zip(idle.gradients, gradients, strict=True))
        )
        if idle is None or not is_cleared:
            self._idle[optimizer] = _Idle(self.step, weights, references)
            return
        idle.gradients, idle.looks = references, idle.looks + 1
        if idle.looks < LOOKS or self.step - idle.begin < SPAN:
            return
        with torch.no_grad():
            flags = [local(gradient).detach().ne(0).any() for gradient in gradients]
        names = Names.of([self.name_of(p) or f"parameter {n}" for n, p in enumerate(followed)])
        line = self._lines.get(optimizer, "")
        fact = NeverStepped(self.step, type(optimizer).__name__, line, len(params), names)
        self.when_known(functools.partial(self._compare, idle.weights, weights, fact), *flags)

    def _compare(
        self, before: Snapshot, now: Snapshot, fact: NeverStepped, *has_values: NDArray[np.generic]
    ) -> None:
        """Report gradients that are not zero, of weights that nothing has changed."""
        if all(has_values) and all(map(np.array_equal, before.arrays, now.arrays)):
            self.report(fact)
