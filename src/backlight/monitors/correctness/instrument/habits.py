"""What the loop does at its first steps, recorded once: no comparison is made in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.batches import plain_tensors
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import Node, below_shapes, first_input, inputs_of, kind_of, terms
from backlight.capture.modules import walk
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import FIRST_STEPS, Check
from backlight.monitors.correctness.instrument.module_modes import is_batch_norm, is_dropout
from backlight.monitors.correctness.instrument.samples import sampled
from backlight.monitors.correctness.model.habits import GivenTensor, Habits

FROM_STEP = 2
"""Step from which on values of the inputs are read."""

OPERATIONS = 3
"""Operations that name a loss, down from its function."""

TENSORS = 4
"""Tensors of a forward that are described."""


class LoopHabits(Check):
    """Records the calls of a step, the modes of modules, the losses, and what the model is given."""

    name = "habits"
    steps = "first"

    def _start(self) -> None:
        self._calls: list[str] = []
        self._orders = Counter[str]()
        self._modes = Counter[str]()
        self._losses = Counter[str]()
        self._outputs: dict[str, None] = {}
        self._shapes: list[list[tuple[str, int, int]]] = []  # by step: type, dimensions, first dimension
        self._values: list[list[NDArray[np.float64]]] = []
        self._is_next, self._is_over = True, False

    def forget(self) -> None:
        """Record what was observed: the first steps are over, or the run."""
        if self._orders and not self._is_over:
            self._is_over = True
            self.when_known(self._record)

    # Events

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what the first forward of a step is given."""
        if HUB.forward_depth > 1 or not torch.is_grad_enabled() or HUB.backward_depth or is_transforming():
            return
        self._note("forward")
        if not self._is_next or self._is_over or is_capturing_graph():
            return
        self._is_next = False
        tensors = plain_tensors((*args, *kwargs.values()))[:TENSORS]
        shapes = [(str(x.dtype).removeprefix("torch."), x.ndim, len(x) if x.ndim else 0) for x in tensors]
        self._shapes.append(shapes)
        # Not at the first steps, which have launches enough.
        if tensors and self.run.clock.done >= FROM_STEP:
            snapshot = self.snapshot([sampled(x) for x in tensors])
            self.when_known(
                lambda: self._values.append([np.asarray(a, dtype=np.float64) for a in snapshot.arrays])
            )

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Note the types of what a model returns."""
        if HUB.forward_depth == 1 and torch.is_grad_enabled() and not HUB.backward_depth:
            types = (str(x.dtype).removeprefix("torch.") for x in plain_tensors(result)[:TENSORS])
            self._outputs.update(dict.fromkeys(types))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Note the functions that the losses come from."""
        self._note("backward")
        for root in roots if self.due else ():
            losses = [
                (kind, node) for kind, node in terms(root.grad_fn) if hasattr(type(node), "_saved_target")
            ]
            self._losses.update({_chain(kind, node) for kind, node in losses} or {kind_of(root.grad_fn)})

    def unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Note the call."""
        self._note("unscale")

    def clip_begin(self, kind: str, tensors: Sequence[Tensor], limit: float, norm: Tensor | None) -> None:
        """Note the call."""
        self._note("clip")

    def schedule_end(self, schedule: Any) -> None:
        """Note the call."""
        self._note("schedule")

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Note the call, and the modes of the modules of the model; the calls so far are those of a step."""
        if not self.run.scope.holds(optimizer):
            return
        self._note("optimizer")
        if self._is_next or self.run.clock.done >= FIRST_STEPS:
            return
        self._orders[" ".join(self._calls)] += 1
        self._calls, self._is_next = [], True
        table = self.run.scope.table
        for model in self.run.scope.roots({id(t) for t in table.tensors()}):
            for _, module in walk(model):
                if is_dropout(module) or is_batch_norm(module):
                    kind = "dropout" if is_dropout(module) else "batch norm"
                    self._modes[f"{kind} in {'training' if module.training else 'evaluation'} mode"] += 1

    def _note(self, call: str) -> None:
        # Once for each step: the number of microbatches is no habit.
        if call not in self._calls:
            self._calls.append(call)

    # The record

    def _record(self) -> None:
        common = min(map(len, self._shapes), default=0)
        inputs = tuple(
            self._tensor([shapes[n] for shapes in self._shapes], [v[n] for v in self._values if len(v) > n])
            for n in range(common)
        )
        self.record(
            Habits(
                0, sum(self._orders.values()), dict(self._orders), dict(self._modes), dict(self._losses),
                inputs, tuple(self._outputs),
            )
        )  # fmt: skip

    @staticmethod
    def _tensor(shapes: Sequence[tuple[str, int, int]], values: Sequence[NDArray[np.float64]]) -> GivenTensor:
        dtype, dimensions, _ = shapes[0]
        lengths = [samples for _, _, samples in shapes]
        mean = rms = None
        if "float" in dtype and values:
            every = np.concatenate([np.ravel(v) for v in values])
            mean, rms = float(every.mean()), float(np.sqrt(np.mean(every**2)))
        return GivenTensor(dtype, dimensions, (min(lengths), max(lengths)), mean, rms)


def _chain(kind: str, node: Node) -> str:
    """Return a loss function with the operations that made its input: ``NllLoss of LogSoftmax of Addmm``."""
    kinds = [kind]
    while len(kinds) < OPERATIONS:
        node = below_shapes(first_input(node))
        if node is None or not inputs_of(node):  # a parameter
            break
        kinds.append(kind_of(node))
    return " of ".join(kinds)
