"""What the model is given at the first steps: the same batch again, or the batch of another rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backlight.capture.batches import plain_tensors
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.modules import holding
from backlight.capture.replicas import averaged_over
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import FIRST_STEPS, Check
from backlight.monitors.correctness.instrument.loader_batches import data_of, length
from backlight.monitors.correctness.instrument.samples import sampled
from backlight.monitors.correctness.model.contradictions import INPUT

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

TENSORS = 8
"""Tensors among the arguments of a forward that are compared."""

STALE_STEPS = 3
"""Steps on one batch, while the loader gives others, before that is reported."""

Known = tuple[bytes, ...]
"""Samples of tensors as the host holds them."""


class ModelInputs(Check):
    """``repeated_data``: the arguments of the first forward of each step.

    On several ranks a digest of them is recorded, with the ranks that are to have other data. In each process
    they are compared with the first batch that a loader gave: a loop may go on to use it.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._is_next = True
        self._first: Known = ()
        self._latest: Known = ()
        self._given = 0
        self._data = ""
        self._length = 0
        self._held: list[int] = []  # batches given up to each step on the first batch, one after the other

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Keep samples of the first batch and of this one, and count them."""
        if self.run.clock.done > FIRST_STEPS:
            return
        plain = [x for x in plain_tensors(batch) if x.device.type == "cpu"]
        self._latest = tuple(sampled(x).float().numpy().tobytes() for x in plain)
        self._given += 1
        if self._given == 1:
            self._data = data_of(iterator)
            self._length = length(getattr(iterator, "_index_sampler", None))
            self._first = self._latest

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """The next forward is that of another step."""
        self._is_next = self._is_next or self.run.scope.holds(optimizer)

    def forward_inputs(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read a sample of the arguments."""
        step = self.run.clock.done
        is_first = self._is_next and torch.is_grad_enabled() and not HUB.backward_depth
        if not is_first or step >= FIRST_STEPS or is_transforming() or is_capturing_graph():
            return
        self._is_next = False
        given = plain_tensors((*args, *kwargs.values()))[:TENSORS]
        if not given or len({x.device for x in given}) > 1:
            return
        shapes, values = [tuple(x.shape) for x in given], self.snapshot([sampled(x) for x in given])
        given_now = (self._given, self._latest)
        self.when_known(lambda: self._compare(step, given_now, shapes, values.arrays))

    def _compare(
        self,
        step: int,
        given: tuple[int, Known],
        shapes: Sequence[tuple[int, ...]],
        values: Sequence[NDArray[np.generic]],
    ) -> None:
        """Compare the first tensor of a forward with the first batch, and with the latest."""
        if self.run.world_size > 1:
            content = hashlib.blake2b(repr(shapes).encode() + b"".join(map(_bytes, values)), digest_size=8)
            trained = {id(parameter) for parameter in self.run.scope.parameters()}
            models = holding([*self.run.scope.models, *HUB.seen.roots()], trained)
            facts = {"digest": content.hexdigest(), "ranks": averaged_over(models)}
            self.run.notifier.event(INPUT, facts, step)
        (batches, latest), own = given, _bytes(values[0])
        # Some tensors, such as masks, are the same in every batch.
        if own not in self._first or (batches > 1 and own in latest):
            self._held = []
            return
        self._held.append(batches)
        steps = len(self._held)
        if steps >= STALE_STEPS and len(set(self._held)) == steps:
            self.report("repeated_data", step, kind="stale", data=self._data, batches=batches)
        elif is_last_step(step, steps) and batches == 1 and self._length > 1:
            self.report("repeated_data", step, kind="held", data=self._data, batches=self._length)


def is_last_step(step: int, observed: int) -> bool:
    """Return whether ``step`` is the last one that is compared, and all but the first were observed.

    A model that is compiled after its optimizer was made is followed from the second step on.
    """
    return step == FIRST_STEPS - 1 and observed >= FIRST_STEPS - 1


def _bytes(values: NDArray[np.generic]) -> bytes:
    return values.astype(np.float32).tobytes()
