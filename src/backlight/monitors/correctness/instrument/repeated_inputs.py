"""Whether the model is given equal values at each of the first steps, in tensors that are made anew."""

from __future__ import annotations

import functools
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
from backlight.capture.loss_terms import are_plain, terms
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import FIRST_STEPS, Check
from backlight.monitors.correctness.instrument.model_inputs import is_last_step
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled
from backlight.user_code import user_scopes

if TYPE_CHECKING:
    from types import FrameType

    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

TENSORS = 8
"""Tensors of a step that are compared."""

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

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
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

    def forward_inputs(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the tensors that a forward of the step is given."""
        if self._is_over or not torch.is_grad_enabled() or HUB.backward_depth:
            return
        if is_transforming() or is_capturing_graph() or self.run.clock.index >= FIRST_STEPS:
            self.forget()
        else:
            given = plain_tensors((*args, *kwargs.values()))[: TENSORS - len(self._inputs)]
            self._note(given, self._inputs)

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Note the targets of the losses below."""
        for root in roots if self._inputs else ():
            for _, node in terms(root.grad_fn):
                # Of the class: to read it from the node computes a checkpointed region again.
                if hasattr(type(node), "_saved_target") and are_plain(node, "target"):
                    given = plain_tensors(node._saved_target)[: TENSORS - len(self._targets)]
                    self._note(given, self._targets)

    def _note(self, given: Sequence[Tensor], noted: list[_Sampled]) -> None:
        if given:
            snapshot = self.snapshot([sampled(x) for x in given])
            noted += [_Sampled.of(x, snapshot, row) for row, x in enumerate(given)]

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare the tensors of the step with those of the first one."""
        inputs, targets = self._inputs, self._targets
        self._restart()
        if self._is_over or not inputs or not self.run.scope.holds(optimizer):
            return
        given = [*inputs, *targets]
        is_kept = [False] * len(inputs)
        if len(inputs) == len(self._origins):
            arrays = _named_arrays(sys._getframe(1))
            is_kept = [
                (one.pointer, one.size) in arrays or (before() is not None and before() is one.origin())
                for before, one in zip(self._origins, inputs, strict=True)
            ]
        self._origins = [one.origin for one in inputs]
        samples = max(one.samples for one in inputs)
        if all(is_kept) or len({one.device for one in given}) > 1 or samples < 2:
            self.forget()
            return
        facts = {
            "samples": samples,
            "has_targets": bool(targets),
            "is_kept": is_kept,
            "is_copied": inputs[0].device.type != "cpu",
        }
        self.when_known(functools.partial(self._compare, self.run.clock.index, inputs, targets, facts))

    def _compare(
        self, step: int, inputs: Sequence[_Sampled], targets: Sequence[_Sampled], facts: Mapping[str, Any]
    ) -> None:
        content = repr([one.size for one in inputs]).encode()
        content += b"".join(one.values().tobytes() for one in [*inputs, *targets])
        if self._first is None:
            self._first = content
            self._is_over = self._is_over or all(_is_grid(one.values()) for one in inputs)
        elif any(facts["is_kept"]) and all(
            is_kept or _is_grid(one.values()) for is_kept, one in zip(facts["is_kept"], inputs, strict=True)
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
                is_sure = facts["has_targets"] and not facts["is_copied"]
                kind = "same" if is_sure else "perhaps_same"
                self.report("repeated_data", step, kind=kind, samples=facts["samples"], equal=self._equal)


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
