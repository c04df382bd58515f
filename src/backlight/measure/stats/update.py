"""The change of the weights in an optimizer step and the weights before it: exact, or from a fixed sample.

P parameters, whose samples are kept in N rows of W weights. A sample is every k-th weight in index order,
with a k that is coprime to the size: a stride that divides the width of a matrix would cover a few columns
only.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.devices import widest_float
from backlight.measure.stats.compiled_rows import DTYPES, is_plain
from backlight.measure.stats.fused_rows import AddressTable, Entry, entry, fused_rows
from backlight.measure.stats.kernels import root_sum_squares_by, row_norms
from backlight.measure.transfer import Arrays, PendingArrays, TransferBatch, start_copy

PER_TENSOR = 4096
"""Weights sampled of a tensor, about, unless something else is asked for."""

_ROW = 256  # scalars
_ROWS = 2**11  # rows compared at once: a float64 copy of them is 4 MiB

_Key = tuple[torch.Size, torch.device, torch.dtype]


class WeightSample:
    """A fixed sample of the weights of P parameters, kept before a step and compared after it.

    Parameters are read again each time, so their memory and type may be replaced, and nothing keeps them or
    their memory outside of a step. Between ``per_tensor`` and twice as many weights are sampled of a tensor;
    None samples all, which costs a copy of the model. ``local`` returns the part of a parameter that this
    process holds.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        per_tensor: int | None = PER_TENSOR,
        local: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._parameters = tuple(map(weakref.ref, parameters))
        self._per_tensor = per_tensor
        self._local = local
        self._keys: list[_Key | None] | None = None
        self._kept: list[_Kept] = []

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether it samples these parameters, and no others."""
        return [id(reference()) for reference in self._parameters] == [id(p) for p in parameters]

    def before(self) -> None:
        """Keep the sampled weights as they are now."""
        with torch.no_grad():
            now = self._read()
            keys = [None if t is None else (t.shape, t.device, t.dtype) for t in now]
            if keys != self._keys:
                self._assign(keys)
            for kept in self._kept:
                kept.keep(now)

    def after(self, transfer: TransferBatch | None = None) -> PendingArrays:
        """Compare the weights with those that were kept.

        The result is float64 ``[P, 2]``: norm of the change and norm of the weights before it, estimated as
        the norm over the sample times the root of numel / sampled; and int64 ``[P, 3]``: measured, sampled,
        numel. A parameter that was not readable before, or has another shape or device since, is not
        measured. ``transfer`` copies the results together with others of the same step.
        """
        keys = self._keys or [None] * len(self._parameters)
        sampled_P = np.zeros(len(keys), dtype=np.int64)
        numel_P = np.zeros(len(keys), dtype=np.int64)
        with torch.no_grad():
            now = [
                tensor if key is not None and tensor is not None and _is_comparable(tensor, key) else None
                for tensor, key in zip(self._read(), keys, strict=True)
            ]
            owners = [kept.owner for kept in self._kept]
            measured_P = np.array([tensor is not None for tensor in now], dtype=bool)
            for kept in self._kept:
                for slot in kept.slots:
                    sampled_P[slot.position] = slot.taken
                    numel_P[slot.position] = math.prod(kept.shapes[slot.position])
            enqueue = start_copy if transfer is None else transfer.add
            transfers = [enqueue(kept.compare(now)) for kept in self._kept]

        def finish(received: list[NDArray[np.generic]]) -> Arrays:
            owner = np.concatenate([np.empty(0, dtype=np.int64), *owners])
            norms = [table.astype(np.float64, copy=False).reshape(2, -1) for table in received]
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

        return PendingArrays(transfers, finish)

    def _read(self) -> list[Tensor | None]:
        """Return each parameter as it is now, None where nothing is readable."""
        tensors: list[Tensor | None] = []
        for reference in self._parameters:
            tensor = reference()
            if tensor is not None and self._local is not None:
                tensor = self._local(tensor)
            is_plain = tensor is not None and tensor.layout is torch.strided and not tensor.is_meta
            # Sharding frees the memory of whole parameters without changing their shape.
            if tensor is None or not is_plain or (tensor.numel() and not tensor.data_ptr()):
                tensors.append(None)
            else:
                tensors.append(tensor.detach() if tensor.is_floating_point() or tensor.is_complex() else None)
        return tensors

    def _assign(self, keys: list[_Key | None]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], _Kept] = {}
        for position, key in enumerate(keys):
            if key is not None:
                kind = key[1:]
                if kind not in kinds:
                    kinds[kind] = _Kept(*kind)
                kinds[kind].add(position, key[0], self._per_tensor)
        self._keys, self._kept = keys, list(kinds.values())


def _is_comparable(tensor: Tensor, key: _Key) -> bool:
    return tensor.shape == key[0] and tensor.device == key[1]


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
        self._targets: list[Tensor] = []
        self._compared: Tensor | None = None
        self._blocks: list[tuple[int, list[_Cut]]] = []
        self._indices: dict[int, tuple[Tensor, ...]] = {}
        widest = widest_float(device)
        self._widest = widest.to_complex() if dtype.is_complex else widest
        self._addresses = AddressTable()
        self._fused = fused_rows(device)
        self._norms = row_norms if self._widest.is_complex or dtype is widest else _plain_norms

    @property
    def owner(self) -> NDArray[np.int64]:
        """The parameter that owns each row ``[N]``."""
        rows = [-(-slot.taken // _ROW) for slot in self.slots]
        return np.repeat(np.array([slot.position for slot in self.slots], dtype=np.int64), rows)

    def add(self, position: int, shape: torch.Size, per_tensor: int | None) -> None:
        """Assign a slot to a parameter."""
        numel = shape.numel()
        step = 1 if per_tensor is None else stride(numel, per_tensor)
        self.slots.append(_Slot(position, step, -(-numel // step), self._rows))
        self.shapes[position] = shape
        self._rows += -(-self.slots[-1].taken // _ROW)

    def keep(self, now: Sequence[Tensor | None]) -> None:
        """Copy the sampled weights into the buffer."""
        if self._buffer is None:
            self._buffer = torch.zeros((self._rows, _ROW), dtype=self._dtype, device=self._device)
            flat = self._buffer.view(-1)
            self._targets = [flat[s.row * _ROW : s.row * _ROW + s.taken] for s in self.slots]
        kept, entries = self._buffer, self._entries(now)
        if (
            (fused := self._fused) is not None
            and entries is not None
            and fused.attempt(lambda: fused.keep(self._addresses, entries, kept)) is not None
        ):
            return
        weights = [self._sample(tensor, s) for s in self.slots if (tensor := now[s.position]) is not None]
        torch._foreach_copy_(self._targets, weights)

    def compare(self, now: Sequence[Tensor | None]) -> Tensor:
        """Return the norms of the change and of what was kept, row by row: ``[2 * N]``."""
        if self._buffer is None or not self._rows:
            return torch.empty(0)
        kept, entries = self._buffer, self._entries(now)
        if (fused := self._fused) is not None and entries is not None:
            norms = fused.attempt(lambda: fused.compare(self._addresses, entries, kept))
            if norms is not None:
                return norms
        if self._compared is None:
            size = (min(self._rows, _ROWS), _ROW)
            self._compared = torch.empty(size, dtype=self._widest, device=self._device)
            self._blocks = list(self._cut(self._compared.view(-1)))
        samples = {s: self._sample(t, s) for s in self.slots if (t := now[s.position]) is not None}
        change, weight = [], []
        for first, cuts in self._blocks:
            old_RW = self._buffer[first : first + _ROWS].to(self._widest)
            new_RW = self._compared[: len(old_RW)].zero_()
            readable = [cut for cut in cuts if cut.slot in samples]
            torch._foreach_copy_([cut.target for cut in readable], [cut.of(samples) for cut in readable])
            weight.append(self._norms(old_RW))
            change.append(self._norms(new_RW.sub_(old_RW)))
        return torch.cat(change + weight)

    def _entries(self, now: Sequence[Tensor | None]) -> list[Entry] | None:
        """Return the entries of the samples for the fused pass; None where that cannot serve."""
        if self._fused is None or not self._rows or self._dtype not in DTYPES:
            return None
        if not self._fused.is_ready():
            self._fused.request()
            return None
        tensors = [now[s.position] for s in self.slots]
        if not all(t is None or (t.dtype in DTYPES and is_plain(t)) for t in tensors):
            return None
        return [entry(t, s.step, s.taken, s.row) for t, s in zip(tensors, self.slots, strict=True)]

    def _cut(self, flat: Tensor) -> Iterator[tuple[int, list[_Cut]]]:
        """Yield first rows, and the weights that are compared together from there, copied into ``flat``."""
        for first in range(0, self._rows, _ROWS):
            cuts = []
            for slot in self.slots:
                ahead = (slot.row - first) * _ROW
                begin, end = max(0, -ahead), min(slot.taken, flat.numel() - ahead)
                if begin < end:
                    cuts.append(_Cut(slot, begin, end, flat[ahead + begin : ahead + end]))
            yield first, cuts

    def _sample(self, tensor: Tensor, slot: _Slot) -> Tensor:
        """Return the sampled weights ``[taken]``, a view where the tensor is contiguous."""
        if tensor.is_contiguous():
            return tensor.as_strided((slot.taken,), (slot.step,))
        if slot.step == 1:
            return tensor.reshape(-1)
        if slot.position not in self._indices:
            index = torch.arange(slot.taken, device=self._device) * slot.step
            self._indices[slot.position] = torch.unravel_index(index, tensor.shape)
        return tensor[self._indices[slot.position]]


class _Cut(NamedTuple):
    """The weights from ``begin`` to ``end`` of a slot's sample, and where they are copied."""

    slot: _Slot
    begin: int
    end: int
    target: Tensor

    def of(self, samples: Mapping[_Slot, Tensor]) -> Tensor:
        """Return the weights."""
        sample = samples[self.slot]
        return sample if self.end - self.begin == self.slot.taken else sample[self.begin : self.end]


def _plain_norms(x_RW: Tensor) -> Tensor:
    """Return the norm of each row of float64 values that were float32 or less, so that no square is lost."""
    norm_R: Tensor = torch.linalg.vector_norm(x_RW, dim=1)
    return norm_R


def stride(numel: int, wanted: int) -> int:
    """Return a k that is coprime to ``numel`` and samples about as many as wanted, at most twice as many."""
    ideal = max(1, numel // wanted)
    for step in range(ideal, (ideal + 1) // 2 - 1, -1):
        if math.gcd(step, numel) == 1 and numel <= 2 * wanted * step:
            return step
    step = ideal + 1
    while math.gcd(step, numel) > 1:
        step += 1
    return step
