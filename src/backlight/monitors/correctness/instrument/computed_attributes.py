"""Whether a module keeps a tensor that was computed from a parameter once, in place of the parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.loss_graph import MAX_NODES, Node, inputs_of
from backlight.capture.modules import holding, kind_of, walk
from backlight.capture.optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.trained_tensors import ComputedOnce

LOOKS = 3
"""Steps at which the attributes of all modules are read."""


class ComputedAttributes(Check):
    """Reads the attributes of modules at the first steps: what a forward computes is new at each."""

    name = "computed_attributes"
    steps = "first"

    def _start(self) -> None:
        self._seen: dict[str, weakref.ref[torch.Tensor]] = {}

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare with the step before."""
        if (
            self.run.clock.index >= LOOKS
            or not self.due
            or HUB.backward_depth
            or not self.run.scope.holds(optimizer)
        ):
            return
        held_ids = {id(p) for other in HUB.optimizers.existing() for p in parameters_of(other)}
        for model in holding(HUB.seen.roots(), {id(p) for p in parameters_of(optimizer)}):
            for name, tensor in computed(model):
                before, self._seen[name] = self._seen.get(name), weakref.ref(tensor)
                if before is None or before() is not tensor:
                    continue
                leaves = [leaf for leaf in leaves_below(tensor) if id(leaf) not in held_ids]
                if leaves and all(leaf.grad is not None for leaf in leaves):
                    self.report(ComputedOnce(self.step, kind_of(model), name, list(tensor.shape)))


def computed(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the attributes of a model that are results of operations with a gradient, each with its path."""
    for name, module in walk(model):
        for attribute, value in vars(module).items():
            if type(value) is torch.Tensor and value.grad_fn is not None:
                yield f"{name}.{attribute}" if name else attribute, value


def leaves_below(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a result was computed from; none where there are too many nodes."""
    pending: list[Node] = [tensor.grad_fn]
    leaves: list[torch.Tensor] = []
    for _ in range(MAX_NODES):
        if not pending:
            return leaves
        node = pending.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        pending += [below for below in inputs_of(node) if below is not None]
    return []
