"""How much one target of each microbatch weighs in the gradient of a step, and what classes are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.hooks import scale_of
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import (
    CLASS_LOSSES,
    RESHAPES,
    SHOWS_HOOKS,
    Node,
    are_plain,
    inputs_of,
    kind_of,
    shape_of,
    terms,
)
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.capture.replicas import averaged_over
from backlight.capture.training_threads import outside_modes
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loss_input import is_multiple
from backlight.monitors.correctness.rules.uneven_microbatches import (
    UNEVEN,
    Classes,
    DividedTwice,
    RankTargets,
    SumOfMeans,
    UnevenMicrobatches,
)
from backlight.user_code import user_line

MEAN = 1
"""``reduction`` of torch's loss functions that divides by the number of targets; 2 is the sum."""

ROUNDING = 1e-3
"""Deviation from 1 of the gradient that arrives at a loss which nothing divides, of any type."""

SAMPLED = 4
"""Parameters of each optimizer whose gradients are followed between the backward passes of a step."""

MAX_FACTORS = 8
"""Factors and divisors above a loss that are read."""


@dataclass
class _Part:
    """The loss of one backward: its targets, and the gradient that arrives at it."""

    classes: int
    is_mean: bool
    is_whole: bool
    targets: Tensor
    gradients: list[Tensor] = field(default_factory=list)


class MicrobatchWeights(Check):
    """``uneven_microbatches``: targets of one step whose weights in its gradient differ.

    The weight of a target is the gradient that arrives at the loss function, divided by the number of targets
    where the function takes their mean. Losses of class indices are followed, one per backward. Numbers of
    targets that are the same at every step belong to several tasks, and are left out. The number of classes
    is recorded once, with the factor of the loss.
    """

    name = "microbatch_weights"

    def _start(self) -> None:
        self._comparisons = 0
        self._targets: set[tuple[int, ...]] = set()
        self._is_readable = SHOWS_HOOKS
        self._has_classes = False
        self._averaged: tuple[int, ...] | None = None  # ranks over which gradients are averaged
        self.forget()

    def forget(self) -> None:
        """Drop the losses of the step in progress."""
        self._parts: list[_Part | None] = []
        self._divisors: list[Counter[float]] = []  # of each backward
        self._lines: list[str] = []
        self._gradients: list[tuple[int, int]] | None = None  # some, and their versions, after a backward
        self._are_added = True
        self._scale: Tensor | None = None

    def scaled(self, scaler: Any, loss: Tensor, result: Tensor) -> None:
        """Gradients contain the scale."""
        self._scale = scale_of(scaler)

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Find the loss function, and follow what arrives at it."""
        if self.due:
            if self._gradients is not None:
                # A script that takes the gradients of each loss apart clears them in between.
                self._are_added = self._are_added and self._gradients == self._sampled_gradients()
            is_readable = len(roots) == 1 and not is_capturing_graph()
            self._parts.append(_part(roots[0].grad_fn) if is_readable else None)
            self._divisors.append(_divisors(roots[0].grad_fn) if is_readable else Counter())
            self._lines.append(str(user_line() or ""))

    def backward_end(self) -> None:
        """Note some gradients, to which the next backward of the step is to add."""
        self._gradients = self._sampled_gradients() if self.due and self._parts else None

    def _sampled_gradients(self) -> list[tuple[int, int]]:
        parameters = [p for o in self.run.scope.optimizers() for p in parameters_of(o)[:SAMPLED]]
        return [(id(p.grad), local(p.grad)._version) for p in parameters if p.grad is not None]

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare the microbatches of the step."""
        parts, divisors, scale, lines = self._parts, self._divisors, self._scale, self._lines
        # What is written to them here may divide them: by hand, by clipping or by a scaler.
        are_added = self._are_added and self._gradients == self._sampled_gradients()
        self.forget()
        readable = [part for part in parts if part is not None and len(part.gradients) == 1]
        is_plain = self.due and not has_closure and not HUB.backward_depth
        is_divided_twice = len(parts) > 1 and all(part[len(parts)] > 1 for part in divisors)
        if is_plain and is_divided_twice and self.run.scope.holds(optimizer):
            self.report(DividedTwice(self.step, len(parts)))
        if is_plain and len(parts) > 1 and not self._is_readable:
            self._is_readable = True  # said once
            reason = "this torch does not show whether a saved tensor has hooks, so none of a loss is read"
            self.run.notifier.unmeasured("uneven_microbatches", reason)
        if not is_plain or not readable or len(readable) < len(parts) or not self.run.scope.holds(optimizer):
            return
        numbers = [number.reshape(1) for p in readable for number in (p.gradients[0], p.targets)]
        values = self.snapshot(numbers if scale is None else [*numbers, scale.detach().reshape(1)])
        has_classes = not self._has_classes and readable[-1].is_mean and readable[-1].is_whole
        self._has_classes = self._has_classes or has_classes
        is_compared = len(readable) > 1 and len({(part.classes, part.is_mean) for part in readable}) == 1
        self._comparisons += is_compared
        step, comparisons, averaged = self.step, self._comparisons, self._ranks()

        def use() -> None:
            flat = [float(value[0]) for value in values.arrays]
            table_P2 = np.array(flat[: 2 * len(readable)]).reshape(-1, 2)
            table_P2[:, 0] /= 1.0 if scale is None else flat[-1]
            if has_classes:
                self.record(Classes(step, readable[-1].classes, float(table_P2[-1, 0])))
            gradients, targets = table_P2.T
            if not np.isfinite(table_P2).all() or not (gradients > 0).all() or not targets.all():
                return
            weights = np.where([part.is_mean for part in readable], gradients / targets, gradients)
            if averaged:
                mean = float(weights @ targets / targets.sum())
                self.record(RankTargets(step, round(targets.sum()), mean, averaged))
            if is_compared:
                self._compare(step, comparisons, weights, targets)
                # Of one line: several tasks have a backward each, whose sum is meant.
                is_sum = (
                    are_added
                    and all(part.is_mean and part.is_whole for part in readable)
                    and len(set(lines)) == 1
                )
                if is_sum and np.abs(gradients - 1.0).max() < ROUNDING:
                    self.report(SumOfMeans(step, len(readable), lines[0]))

        self.when_known(use)

    def _ranks(self) -> tuple[int, ...]:
        """Return the ranks over which gradients are averaged, this one included; none for one rank."""
        if self._averaged is None:
            is_one = self.run.world_size < 2
            roots = [] if is_one else [*self.run.scope.models, *HUB.seen.roots()]
            self._averaged = tuple(averaged_over(roots))
        return self._averaged

    def _compare(
        self, step: int, comparisons: int, weights: NDArray[np.float64], targets: NDArray[np.float64]
    ) -> None:
        ratio, counts = float(weights.max() / weights.min()), [round(n) for n in targets]
        self._targets.add(tuple(counts))
        if ratio > UNEVEN and len(self._targets) > 1:
            self.report(UnevenMicrobatches(step, tuple(counts), ratio, comparisons))


def _divisors(root: Node | None) -> Counter[float]:
    """Return how often a loss was divided by each plain number, less how often it was multiplied by it."""
    divisors: Counter[float] = Counter()
    for _ in range(MAX_FACTORS):
        kind = kind_of(root)
        below = [node for node in inputs_of(root) if node is not None] if kind else []
        if len(below) != 1 or not (kind in RESHAPES or kind in {"Mul", "Div"}):
            break
        if kind in {"Mul", "Div"} and are_plain(root, "other"):
            factor = getattr(root, "_saved_other", None)
            if isinstance(factor, Tensor) and not factor.ndim and factor.device.type == "cpu":
                with outside_modes():  # a number of the script, which no device holds
                    divisors[float(factor)] += 1 if kind == "Div" else -1
        root = below[0]
    return divisors


def _part(root: Node | None) -> _Part | None:
    """Return the loss function below ``root``; None where there is none, more than one, or class weights."""
    losses = [node for kind, node in terms(root) if kind in CLASS_LOSSES]
    if len(losses) != 1:
        return None
    node = losses[0]
    shape = shape_of(inputs_of(node)[0])
    is_plain = are_plain(node, "total_weight", "weight")
    reduction = getattr(node, "_saved_reduction", 0)
    if shape is None or len(shape) < 2 or not reduction or not is_plain or node._saved_weight is not None:
        return None
    targets = node._saved_total_weight
    part = _Part(shape[1], reduction == MEAN, is_multiple(root, node), targets.detach().reshape(()))

    def follow(gradients: Sequence[Tensor | None]) -> None:
        if gradients[0] is not None:
            with outside_modes():
                part.gradients.append(gradients[0].detach())

    node.register_prehook(follow)
    return part
