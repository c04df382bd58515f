"""Whether inputs and targets come from two loaders that shuffle apart."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import indices_of, plain_tensors
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import are_plain, terms
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loader_batches import (
    SHUFFLING,
    data_of,
    kind_of_sampler,
    length,
)
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled
from backlight.monitors.correctness.rules.loss_input import LoadersApart

STEPS = 3
"""Steps with other samples in inputs and targets before that is reported."""


@dataclass
class _Batch:
    """The only tensor of a batch, as samples of its values, and which samples of the data set it is of."""

    data: int
    name: str
    count: int
    indices: tuple[int, ...]
    shape: torch.Size
    values: bytes


class LoaderPairs(Check):
    """``loss_input``: the model is given what one loader gave, and its loss compares with what another gave.

    Both shuffle data sets of one length, of one tensor a sample each, and the indices of the batches differ.
    What the other gave reaches no model: images of two domains, or views of a sample, are no pairs.
    """

    name = "loader_pairs"

    def _start(self) -> None:
        self._steps = 0
        self.forget()

    def forget(self) -> None:
        """Compare nothing of this step."""
        self._batches: list[_Batch] | None = []
        self._fed: list[tuple[torch.Size, Snapshot]] = []

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note a batch of a loader that shuffles."""
        if self._batches is None or not self.due or self._steps >= STEPS:
            return
        sampler, indices = getattr(iterator, "_index_sampler", None), indices_of(iterator, index)
        tensors = [x for x in plain_tensors(batch) if x.device.type == "cpu"]
        if len(tensors) != 1 or not indices or kind_of_sampler(sampler) not in SHUFFLING or self._fed:
            self._batches = None
            return
        data, values = getattr(iterator, "_dataset", None), sampled(tensors[0]).float().numpy().tobytes()
        part = _Batch(id(data), data_of(iterator), length(data), tuple(indices), tensors[0].shape, values)
        self._batches.append(part)

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy some values of what a model is given."""
        if self._batches is None or len(self._batches) != 2 or HUB.backward_depth:
            return
        if is_transforming() or is_capturing_graph() or len(self._fed) > 2:
            self._batches = None
            return
        shapes = [batch.shape for batch in self._batches]
        for x in plain_tensors((*args, *kwargs.values())):
            if x.shape in shapes:
                self._fed.append((x.shape, self.snapshot([sampled(x).float()])))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare inputs and targets with the batches."""
        batches, fed = self._batches, self._fed
        self.forget()
        if batches is None or len(batches) != 2 or not fed:
            return
        a, b = batches
        if a.data == b.data or a.count != b.count or len(a.indices) != len(b.indices):
            return
        if a.indices == b.indices:
            return
        nodes = [n for root in roots for _, n in terms(root.grad_fn) if hasattr(type(n), "_saved_target")]
        if len(nodes) != 1 or not are_plain(nodes[0], "target"):
            return
        target = nodes[0]._saved_target
        used = self.snapshot([sampled(target).float()])
        self.when_known(functools.partial(self._compare, self.step, batches, [s for _, s in fed], used))

    def _compare(self, step: int, batches: Sequence[_Batch], fed: Sequence[Snapshot], used: Snapshot) -> None:
        inputs, target = {snapshot.arrays[0].tobytes() for snapshot in fed}, used.arrays[0].tobytes()
        for of_inputs, of_targets in (batches, batches[::-1]):
            if inputs == {of_inputs.values} and target == of_targets.values:
                self._steps += 1
                if self._steps >= STEPS:
                    names = of_inputs.name, of_targets.name
                    self.report(LoadersApart(step, *names, of_inputs.indices[0], of_targets.indices[0]))
