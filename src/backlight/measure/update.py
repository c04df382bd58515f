"""The step that an optimizer took, against the weights it started from: exactly, or from a fixed sample.

P parameters, whose samples are kept in N rows of W weights. A sample is every k-th weight in the order
of the indices, with a k that has no factor in common with the size: a stride that divides the width of
a matrix would see a few columns only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.carrier import Carrier
from backlight.measure.norms import root_sum_squares_by
from backlight.measure.pending import Arrays, Pending, send
from backlight.measure.rows import row_norms

FLOATS = ("update_norm", "weight_norm")
"""Names of the float64 columns, in order."""

INTEGERS = ("measured", "sampled", "numel")
"""Names of the int64 columns, in order."""

PER_TENSOR = 4096
"""Weights sampled of a tensor, about, unless something else is asked for."""

_ROW = 256
_ROWS = 2**11  # rows compared at once: a float64 copy of them is 4 MiB

_Key = tuple[torch.Size, torch.device, torch.dtype]


class Sample:
    """A fixed sample of the weights of some parameters, kept before a step and compared after it.

    Parameters
    ----------
    parameters
        P tensors. They are looked up again each time, so their memory and type may be replaced.
    per_tensor
        About how many weights are sampled of a tensor, at most twice that; None for all of them, which
        costs a copy of the model.
    local
        Gives the part of a parameter that this process holds; the parameter itself by default.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        per_tensor: int | None = PER_TENSOR,
        local: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._parameters = tuple(parameters)
        self._per_tensor = per_tensor
        self._local = local
        self._keys: list[_Key | None] | None = None
        self._kept: list[_Kept] = []

    @classmethod
    def of(
        cls,
        parameters: Sequence[Tensor],
        per_tensor: int | None = PER_TENSOR,
        local: Callable[[Tensor], Tensor] | None = None,
    ) -> Self:
        """Choose the sample of these parameters; nothing is read yet."""
        return cls(parameters, per_tensor, local)

    def before(self) -> None:
        """Keep the sampled weights as they are now."""
        with torch.no_grad():
            now = [self._look(parameter) for parameter in self._parameters]
            keys = [None if t is None else (t.shape, t.device, t.dtype) for t in now]
            if keys != self._keys:
                self._place(keys)
            for kept in self._kept:
                kept.keep(now)

    def after(self, carrier: Carrier | None = None) -> Pending:
        """Compare the weights with those that were kept.

        Parameters
        ----------
        carrier
            Takes the results along with others of the same step; without one they travel at once.

        Returns
        -------
        Pending
            float64 ``[P, 2]``: norm of the change and norm of the weights before it, each estimated for
            the whole tensor as the norm over the sample times the root of numel / sampled. int64
            ``[P, 3]``: measured, sampled, numel. Not measured is what was not there before, or has
            another shape or device since.
        """
        keys = self._keys or [None] * len(self._parameters)
        sampled_P = np.zeros(len(keys), dtype=np.int64)
        numel_P = np.zeros(len(keys), dtype=np.int64)
        with torch.no_grad():
            now = [self._look(parameter) for parameter in self._parameters]
            for i, (tensor, key) in enumerate(zip(now, keys, strict=True)):
                if tensor is not None and (key is None or (tensor.shape, tensor.device) != key[:2]):
                    now[i] = None
            owners = [kept.owner for kept in self._kept]
            measured_P = np.array([tensor is not None for tensor in now], dtype=bool)
            for kept in self._kept:
                for slot in kept.slots:
                    sampled_P[slot.position] = slot.taken
                    numel_P[slot.position] = math.prod(kept.shapes[slot.position])
            go = send if carrier is None else carrier.take
            flights = [go(kept.compare(now)) for kept in self._kept]

        def finish(arrived: list[NDArray[np.generic]]) -> Arrays:
            owner = np.concatenate([np.empty(0, dtype=np.int64), *owners])
            norms = [table.astype(np.float64, copy=False).reshape(2, -1) for table in arrived]
            size = len(sampled_P)
            values = np.stack(
                [
                    root_sum_squares_by(owner, row, size)
                    for row in np.concatenate([np.empty((2, 0)), *norms], axis=1)
                ],
                axis=1,
            )
            values *= np.sqrt(numel_P / np.maximum(sampled_P, 1))[:, None]
            counts = np.stack((np.ones(size, dtype=np.int64), sampled_P, numel_P), axis=1)
            values[~measured_P] = 0.0
            counts[~measured_P] = 0
            return values, counts

        return Pending(flights, finish)

    def _look(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor to sample as it is now, None where there is nothing to read."""
        tensor = parameter if self._local is None else self._local(parameter)
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        # Sharding frees the memory of whole parameters between uses without changing their shape.
        return None if tensor.numel() and not tensor.untyped_storage().nbytes() else tensor

    def _place(self, keys: list[_Key | None]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], _Kept] = {}
        for position, key in enumerate(keys):
            if key is not None:
                kind = key[1:]
                if kind not in kinds:
                    kinds[kind] = _Kept(*kind)
                kinds[kind].add(position, key[0], self._per_tensor)
        self._keys, self._kept = keys, list(kinds.values())


class _Slot(NamedTuple):
    """``taken`` weights of one parameter, every ``step``-th, kept from row ``row`` on."""

    position: int
    step: int
    taken: int
    row: int


class _Kept:
    """The samples of all parameters of one device and type, in one buffer of rows padded with zeros."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.slots: list[_Slot] = []
        self.shapes: dict[int, torch.Size] = {}
        self._device = device
        self._dtype = dtype
        self._rows = 0
        self._buffer: Tensor | None = None
        self._places: dict[int, tuple[Tensor, ...]] = {}
        widest = torch.float32 if device.type == "mps" else torch.float64
        self._widest = widest.to_complex() if dtype.is_complex else widest

    @property
    def owner(self) -> NDArray[np.int64]:
        """The parameter that each row ``[N]`` is of."""
        rows = [-(-slot.taken // _ROW) for slot in self.slots]
        return np.repeat(np.array([slot.position for slot in self.slots], dtype=np.int64), rows)

    def add(self, position: int, shape: torch.Size, per_tensor: int | None) -> None:
        """Give a parameter its place."""
        numel = shape.numel()
        step = 1 if per_tensor is None else stride(numel, per_tensor)
        self.slots.append(_Slot(position, step, -(-numel // step), self._rows))
        self.shapes[position] = shape
        self._rows += -(-self.slots[-1].taken // _ROW)

    def keep(self, now: Sequence[Tensor | None]) -> None:
        """Copy the sampled weights into the buffer."""
        if self._buffer is None:
            self._buffer = torch.zeros(self._rows * _ROW, dtype=self._dtype, device=self._device)
        buffer = self._buffer
        places = [buffer[s.row * _ROW : s.row * _ROW + s.taken] for s in self.slots]
        weights = [self._sample(tensor, s) for s in self.slots if (tensor := now[s.position]) is not None]
        torch._foreach_copy_(places, weights)

    def compare(self, now: Sequence[Tensor | None]) -> Tensor:
        """Return the norms of the change and of what was kept, row by row: ``[2 * N]``."""
        assert self._buffer is not None
        kept_NW = self._buffer.view(-1, _ROW)
        samples = [(s, self._sample(t, s)) for s in self.slots if (t := now[s.position]) is not None]
        change, weight = [], []
        for first in range(0, self._rows, _ROWS):
            old_RW = kept_NW[first : first + _ROWS].to(self._widest)
            new_RW = torch.zeros_like(old_RW)
            flat, start = new_RW.view(-1), first * _ROW
            places, parts = [], []
            for slot, values in samples:
                begin = max(0, start - slot.row * _ROW)
                end = min(slot.taken, start + flat.numel() - slot.row * _ROW)
                if begin < end:
                    offset = slot.row * _ROW + begin - start
                    places.append(flat[offset : offset + end - begin])
                    parts.append(values[begin:end])
            torch._foreach_copy_(places, parts)
            change.append(row_norms(new_RW.sub_(old_RW)))
            weight.append(row_norms(old_RW))
        return torch.cat(change + weight) if change else torch.empty(0)

    def _sample(self, tensor: Tensor, slot: _Slot) -> Tensor:
        """Return the sampled weights ``[taken]``, a view where the tensor is contiguous."""
        if tensor.is_contiguous():
            return tensor.as_strided((slot.taken,), (slot.step,))
        if slot.step == 1:
            return tensor.reshape(-1)
        if slot.position not in self._places:
            index = torch.arange(slot.taken, device=self._device) * slot.step
            self._places[slot.position] = torch.unravel_index(index, tensor.shape)
        return tensor[self._places[slot.position]]


def stride(numel: int, wanted: int) -> int:
    """Return a k that shares no factor with ``numel`` and takes about as many as wanted, at most twice."""
    ideal = max(1, numel // wanted)
    for step in range(ideal, (ideal + 1) // 2 - 1, -1):
        if math.gcd(step, numel) == 1 and numel <= 2 * wanted * step:
            return step
    step = ideal + 1
    while math.gcd(step, numel) > 1:
        step += 1
    return step
