"""What the model is given at the first steps: the same batch again, or the batch of another rank."""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.batches import plain_tensors
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import are_plain, terms
from backlight.capture.modules import holding
from backlight.capture.replicas import averaged_over
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import FIRST_STEPS, Check
from backlight.monitors.correctness.instrument.loader_batches import data_of, length
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled
from backlight.monitors.correctness.rules import repeated_data as facts
from backlight.user_code import user_scopes

if TYPE_CHECKING:
    from types import FrameType

TENSORS = 8
"""Tensors of a step that are compared."""

STALE_STEPS = 3
"""Steps on one batch, while the loader gives others, before that is reported."""

Known = tuple[bytes, ...]
"""Samples of tensors as the host holds them."""


class ModelInputs(Check):
    """``repeated_data``: the arguments of the first forward of each step.

    On several ranks a digest of them is recorded, with the ranks that are to have other data. In each process
    they are compared with the first batch that a loader gave: a loop may go on to use it.
    """

    name = "model_inputs"
    steps = "first"

    def _start(self) -> None:
        self._is_next = True
        self._first: Known = ()
        self._latest: Known = ()
        self._batches = 0
        self._data = ""
        self._length = 0
        self._counts: list[int] = []  # batches given up to each step on the first batch, one after the other

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Keep samples of the first batch and of this one, and count them."""
        if self.run.clock.done > FIRST_STEPS:
            return
        plain = [x for x in plain_tensors(batch) if x.device.type == "cpu"]
        self._latest = tuple(sampled(x).float().numpy().tobytes() for x in plain)
        self._batches += 1
        if self._batches == 1:
            self._data = data_of(iterator)
            self._length = length(getattr(iterator, "_index_sampler", None))
            self._first = self._latest

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """The next forward is that of another step."""
        self._is_next = self._is_next or self.run.scope.holds(optimizer)

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read a sample of the arguments."""
        step = self.run.clock.done
        is_first = self._is_next and torch.is_grad_enabled() and not HUB.backward_depth
        if not is_first or step >= FIRST_STEPS or is_transforming() or is_capturing_graph():
            return
        self._is_next = False
        tensors = plain_tensors((*args, *kwargs.values()))[:TENSORS]
        if not tensors or len({x.device for x in tensors}) > 1:
            return
        shapes, values = [tuple(x.shape) for x in tensors], self.snapshot([sampled(x) for x in tensors])
        given_now = (self._batches, self._latest)
        self.when_known(lambda: self._compare(step, given_now, shapes, values.arrays))

    def _compare(
        self,
        step: int,
        loader_state: tuple[int, Known],
        shapes: Sequence[tuple[int, ...]],
        values: Sequence[NDArray[np.generic]],
    ) -> None:
        """Compare the first tensor of a forward with the first batch, and with the latest."""
        if self.run.world_size > 1:
            content = hashlib.blake2b(repr(shapes).encode() + b"".join(map(_bytes, values)), digest_size=8)
            trained = {id(parameter) for parameter in self.run.scope.table.tensors()}
            models = holding([*self.run.scope.models, *HUB.seen.roots()], trained)
            self.record(facts.Inputs(step, content.hexdigest(), tuple(averaged_over(models))))
        (batches, latest), sample_bytes = loader_state, _bytes(values[0])
        # Some tensors, such as masks, are the same in every batch.
        if sample_bytes not in self._first or (batches > 1 and sample_bytes in latest):
            self._counts = []
            return
        self._counts.append(batches)
        steps = len(self._counts)
        if steps >= STALE_STEPS and len(set(self._counts)) == steps:
            self.report(facts.StaleBatch(step, self._data, batches))
        elif is_last_step(step, steps) and batches == 1 and self._length > 1:
            self.report(facts.HeldBatch(step, self._data, self._length))


def is_last_step(step: int, observed: int) -> bool:
    """Return whether ``step`` is the last one that is compared, and all but the first were observed.

    A model that is compiled after its optimizer was made is followed from the second step on.
    """
    return step == FIRST_STEPS - 1 and observed >= FIRST_STEPS - 1


def _bytes(values: NDArray[np.generic]) -> bytes:
    return values.astype(np.float32).tobytes()


GRID = 1e-4
"""Deviation from equal distances, as a share of the range, up to which values are a grid."""


@dataclass(frozen=True)
class _Sampled:
    """A tensor that a step was given, which nothing here keeps alive; ``samples`` is 0 for a number.

    ``pointer`` is its address in the memory of the host, 0 on a device.
    """

    snapshot: Snapshot
    row: int  # of the snapshot
    origin: weakref.ref[Tensor]
    device: torch.device
    size: int
    samples: int
    pointer: int

    @classmethod
    def of(cls, tensor: Tensor, snapshot: Snapshot, row: int) -> Self:
        base = tensor._base if tensor._is_view() else None
        origin = weakref.ref(tensor if base is None else base)
        pointer = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        samples = len(tensor) if tensor.ndim else 0
        return cls(snapshot, row, origin, tensor.device, tensor.numel(), samples, pointer)

    def values(self) -> NDArray[np.float32]:
        """Return a sample of its values, once the host has it."""
        values: NDArray[np.float32] = self.snapshot.arrays[self.row].astype(np.float32)
        return values


class RepeatedInputs(Check):
    """``repeated_data``, ``same``: the inputs of all forwards of a step, and the targets of its losses.

    They are those of the step before at each of the first steps, in other tensors: a script that trains on
    all of its data, or on one batch to test it, keeps the tensors, or the arrays whose memory they share.
    Batches of a loader are compared elsewhere. One sample, a grid of equal distances, and constants that are
    made anew next to tensors that are kept, may be all that there is.
    """

    name = "repeated_inputs"

    def _start(self) -> None:
        self._is_over = False
        self._first: bytes | None = None
        self._origins: list[weakref.ref[Tensor]] = []  # of the step before
        self._equal = 1
        self._is_renewed = False
        self._restart()

    def _restart(self) -> None:
        self._inputs: list[_Sampled] = []
        self._targets: list[_Sampled] = []

    def forget(self) -> None:
        """Compare only steps that follow one another."""
        self._is_over = True
        self._restart()
        HUB.remove(self)

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Leave what a loader gives to the checks of loaders."""
        self.forget()

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the tensors that a forward of the step is given."""
        if self._is_over or not torch.is_grad_enabled() or HUB.backward_depth:
            return
        if is_transforming() or is_capturing_graph() or self.step >= FIRST_STEPS:
            self.forget()
        else:
            tensors = plain_tensors((*args, *kwargs.values()))[: TENSORS - len(self._inputs)]
            self._note(tensors, self._inputs)

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Note the targets of the losses below."""
        for root in roots if self._inputs else ():
            for _, node in terms(root.grad_fn):
                # Of the class: to read it from the node computes a checkpointed region again.
                if hasattr(type(node), "_saved_target") and are_plain(node, "target"):
                    tensors = plain_tensors(node._saved_target)[: TENSORS - len(self._targets)]
                    self._note(tensors, self._targets)

    def _note(self, tensors: Sequence[Tensor], noted: list[_Sampled]) -> None:
        if tensors:
            snapshot = self.snapshot([sampled(x) for x in tensors])
            noted += [_Sampled.of(x, snapshot, row) for row, x in enumerate(tensors)]

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare the tensors of the step with those of the first one."""
        inputs, targets = self._inputs, self._targets
        self._restart()
        if self._is_over or not inputs or not self.run.scope.holds(optimizer):
            return
        is_kept = [False] * len(inputs)
        if len(inputs) == len(self._origins):
            arrays = _named_arrays(sys._getframe(1))
            is_kept = [
                (s.pointer, s.size) in arrays or (before() is not None and before() is s.origin())
                for before, s in zip(self._origins, inputs, strict=True)
            ]
        self._origins = [sample.origin for sample in inputs]
        samples = max(sample.samples for sample in inputs)
        if all(is_kept) or len({sample.device for sample in [*inputs, *targets]}) > 1 or samples < 2:
            self.forget()
            return
        self.when_known(functools.partial(self._compare, self.step, inputs, targets, is_kept))

    def _compare(
        self, step: int, inputs: Sequence[_Sampled], targets: Sequence[_Sampled], is_kept: Sequence[bool]
    ) -> None:
        content = repr([sample.size for sample in inputs]).encode()
        content += b"".join(sample.values().tobytes() for sample in [*inputs, *targets])
        if self._first is None:
            self._first = content
            self._is_over = self._is_over or all(_is_grid(sample.values()) for sample in inputs)
        elif any(is_kept) and all(
            was_kept or _is_grid(sample.values()) for was_kept, sample in zip(is_kept, inputs, strict=True)
        ):
            self.forget()
        elif content != self._first and self._equal == 1 and not self._is_renewed:
            # The forwards of step 0 may have compiled the model.
            self._first, self._is_renewed = content, True
        elif content != self._first:
            self.forget()
        elif not self._is_over:
            self._equal += 1
            if is_last_step(step, self._equal):
                is_sure = bool(targets) and inputs[0].device.type == "cpu"
                samples = max(sample.samples for sample in inputs)
                kind = facts.SameBatch if is_sure else facts.SameInputs
                self.report(kind(step, samples, self._equal))


def _named_arrays(frame: FrameType | None) -> set[tuple[int, int]]:
    """Return address and size of the NumPy arrays that the user's frames name."""
    return {
        (value.__array_interface__["data"][0], value.size)
        for _, names in user_scopes(frame)
        for value in names.values()
        if type(value) is np.ndarray
    }


def _is_grid(values: NDArray[np.float32]) -> bool:
    """Return whether the sampled values of a tensor are at equal distances, or all the same."""
    exact = values.astype(np.float64)
    line = np.linspace(exact[0], exact[-1], len(exact))
    return bool(np.all(np.abs(exact - line) <= GRID * max(float(np.ptp(exact)), 1e-12)))
