"""Whether the rows of inputs and targets that a loader gives in pairs reach model and loss in one order."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.batches import plain_tensors
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import (
    CLASS_LOSSES,
    MAX_NODES,
    Node,
    are_plain,
    inputs_of,
    kind_of,
    kinds,
    terms,
)
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import Snapshot, thinned
from backlight.monitors.correctness.rules.loss_input import RowsApart

ROWS = range(8, 1025)
"""Samples of a batch that is compared."""

COLUMNS = 16
"""Values of each sample that are compared, evenly over all."""

STEPS = 3
"""Steps at which the orders differ before that is reported."""

LOOKS = 12
"""Steps that are looked at: the code of a loop rarely changes."""

_CHOICES = kinds("Index IndexSelect Gather Sort TakeAlongDim")
"""Nodes that may put the outputs into the order that the targets have."""


@dataclass
class _Pairs:
    """Sampled columns of the inputs of a batch, its targets, and the shape of the inputs."""

    shape: torch.Size
    inputs: NDArray[np.generic]
    targets: NDArray[np.generic]


class PairedRows(Check):
    """``loss_input``: inputs or targets are permuted between the loader and the loss, and the others are not.

    Only batches of one tensor of inputs and one of classes, one forward with such an input and one loss are
    compared. Mixed and augmented inputs are no permutation.
    """

    name = "paired_rows"

    def _start(self) -> None:
        self._left, self._steps = LOOKS, 0
        self.forget()

    def forget(self) -> None:
        """Compare nothing of this step."""
        self._pairs: _Pairs | None = None
        self._fed: Snapshot | None = None

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Keep samples of the rows."""
        self.forget()
        if not self._left or not self.due:
            return
        tensors = [x for x in plain_tensors(batch) if x.device.type == "cpu" and len(x.shape)]
        inputs = [x for x in tensors if x.ndim > 1 and x.numel() and not x.is_complex()]
        classes = [x for x in tensors if x.ndim == 1 and not x.is_floating_point()]
        if len(inputs) == len(classes) == 1 and len(inputs[0]) == len(classes[0]) in ROWS:
            columns = _columns(inputs[0]).numpy().copy()
            self._pairs = _Pairs(inputs[0].shape, columns, classes[0].detach().numpy().copy())

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy the same columns of what the model is given."""
        if self._pairs is None or not torch.is_grad_enabled() or HUB.backward_depth:
            return
        if is_transforming() or is_capturing_graph() or self._fed is not None:
            self.forget()
            return
        alike = [x for x in plain_tensors((*args, *kwargs.values())) if x.shape == self._pairs.shape]
        if len(alike) == 1:
            self._fed = self.snapshot([_columns(alike[0]).reshape(-1)])

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Copy the targets of the loss, and compare."""
        pairs, fed = self._pairs, self._fed
        self.forget()
        if pairs is None or fed is None:
            return
        losses = [n for root in roots for kind, n in terms(root.grad_fn) if kind in CLASS_LOSSES]
        if len(losses) != 1 or not are_plain(losses[0], "target") or _is_chosen_of(losses[0]):
            return
        targets = losses[0]._saved_target.detach()
        if targets.shape == pairs.targets.shape:
            self._left -= 1
            used = self.snapshot([targets])
            self.when_known(functools.partial(self._compare, self.step, pairs, fed, used))

    def _compare(self, step: int, pairs: _Pairs, fed: Snapshot, used: Snapshot) -> None:
        inputs, targets = fed.arrays[0].reshape(pairs.inputs.shape), used.arrays[0]
        keeps_inputs, keeps_targets = (
            np.array_equal(inputs, pairs.inputs),
            np.array_equal(targets, pairs.targets),
        )
        if keeps_inputs == keeps_targets:
            return
        now, before = (inputs, pairs.inputs) if keeps_targets else (targets, pairs.targets)
        if np.array_equal(np.sort(now, axis=0), np.sort(before, axis=0)):
            self._steps += 1
            if self._steps >= STEPS:
                which = ("inputs", "targets") if keeps_targets else ("targets", "inputs")
                self.report(RowsApart(step, *which, len(targets)))


def _columns(rows: Tensor) -> Tensor:
    """Return some values of each row, at the same places, ``[N, COLUMNS]`` or fewer."""
    flat = rows.detach().flatten(1)
    columns = flat[:, list(thinned(range(flat.shape[1]), COLUMNS))]
    return columns.float() if columns.is_floating_point() else columns  # numpy has no bfloat16


def _is_chosen_of(loss: Node) -> bool:
    """Return whether rows of the outputs are chosen, or brought into another order, before the loss."""
    pending: list[Node] = [loss]
    for node in pending:  # which grow meanwhile
        if kind_of(node) in _CHOICES or len(pending) > MAX_NODES:
            break
        pending += [below for below in inputs_of(node) if below is not None]
    return any(kind_of(node) in _CHOICES for node in pending)
