"""Samples of tensors and batches, small enough to be compared at every step, and their way to the host."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight import devices
from backlight.capture.batches import leaves
from backlight.measure.stats.update import stride
from backlight.measure.transfer import AsyncCopy, start_copy

T = TypeVar("T")

VALUES = 256
"""Values of a tensor that stand for it, at least where it has as many."""


def thinned(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` items, evenly over all of them."""
    return items[:: -(-len(items) // most) or 1]


def places(size: int, count: int = VALUES) -> range:
    """Return about ``count`` to twice as many places in a tensor of ``size`` elements, all of a small one.

    Their distance has no divisor in common with ``size``, so that they meet all columns of a matrix.
    """
    return range(0, size, stride(size, count))


def sampled(tensor: Tensor, count: int = VALUES) -> Tensor:
    """Return the values at :func:`places` of a strided tensor: a view of it where it is contiguous."""
    tensor, chosen = tensor.detach(), places(tensor.numel(), count)
    if tensor.is_contiguous():
        return tensor.view(-1)[:: chosen.step]
    return torch.take(tensor, torch.arange(0, chosen.stop, chosen.step, device=tensor.device))


def first_values(tensor: Tensor, count: int = VALUES) -> Tensor:
    """Return the first values of a strided tensor in memory: a view, unless others lie between them."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return tensor.detach().reshape(-1)[:count]


UNRELATED = 0.5
"""Cosine of samples of 64 values, below which they are unrelated: 4 deviations for random ones."""


def cosine(first: NDArray[np.generic], second: NDArray[np.generic]) -> float:
    """Return the cosine of two samples."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-8))


class Snapshot:
    """Values of several tensors at one moment, copied in one launch per device and type.

    ``tables`` hold them on their devices, or what ``change`` makes of each value there. Once :meth:`arrive`
    has the copies on the host, ``arrays`` are the values of each tensor, in order.
    """

    def __init__(self, samples: Sequence[Tensor], change: Callable[[Tensor], Tensor] | None = None) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, sample in enumerate(samples):
            groups.setdefault((sample.device, sample.dtype), []).append(number)
        self._groups, self._sizes = list(groups.values()), [sample.numel() for sample in samples]
        with torch.no_grad():
            joined = [torch.cat([samples[number] for number in group]) for group in self._groups]
            self.tables = joined if change is None else list(map(change, joined))
        self.arrays: list[NDArray[np.generic]] = []

    def arrive(self, *tables: NDArray[np.generic]) -> None:
        """Take the tables on the host."""
        self.tables, self.arrays = [], [np.empty(0)] * len(self._sizes)
        for group, table in zip(self._groups, tables, strict=True):
            begin = 0
            for number in group:
                self.arrays[number] = table[begin : begin + self._sizes[number]]
                begin += self._sizes[number]


def digest(batch: Any) -> str | None:
    """Return a digest of a sample of a batch's values; None where something in it cannot be read."""
    hasher = hashlib.blake2b(digest_size=8)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                return None
            hasher.update(repr((tuple(leaf.shape), sampled(leaf).tolist())).encode())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            hasher.update(repr(leaf.shape).encode() + leaf.flat[:: places(leaf.size).step].tobytes())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, bool)):
            hasher.update(repr(leaf).encode())
        else:
            return None
    return hasher.hexdigest()


@dataclass
class _Batch:
    """Values that one copy takes to the host together, behind the work of their stream."""

    stream: torch.Stream | None
    values: list[Tensor] = field(default_factory=list)
    copy: AsyncCopy | None = None

    def add(self, value: Tensor) -> _Slot:
        """Add a value, which nothing may change until the copy has started."""
        value = value.detach()
        begin = sum(tensor.nbytes for tensor in self.values)
        self.values.append(value)
        return _Slot(self, slice(begin, begin + value.nbytes), value.dtype, value.shape)

    def start(self) -> None:
        """Start the copy."""
        with devices.on_stream(self.stream):
            parts = [value.reshape(-1).view(torch.uint8) for value in self.values]
            self.copy = start_copy(torch.cat(parts) if len(parts) > 1 else parts[0])
        self.values = []


@dataclass(frozen=True)
class _Slot:
    """The place of a value in the copy of its batch."""

    batch: _Batch
    part: slice
    dtype: torch.dtype
    shape: torch.Size

    def is_done(self) -> bool:
        """Return whether the host may read."""
        return self.batch.copy is not None and self.batch.copy.done()

    def read(self) -> NDArray[np.generic]:
        """Wait for the copy, and return a value of its own."""
        assert self.batch.copy is not None
        content = self.batch.copy.read()[self.part].tobytes()
        value = torch.frombuffer(bytearray(content), dtype=self.dtype) if content else torch.empty(0)
        return _array(value.reshape(self.shape))


def _array(value: Tensor) -> NDArray[np.generic]:
    """Return a tensor on the host as an array; NumPy has no bfloat16."""
    array: NDArray[np.generic] = (value.float() if value.dtype is torch.bfloat16 else value.detach()).numpy()
    return array


class PendingCopies:
    """Values on their way from a device, with what is done with each, in order; the checks share one.

    Those of a step are copied together, when the next one begins.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[torch.device, int], _Batch] = {}
        self._waiting: deque[tuple[list[_Slot | NDArray[np.generic]], Callable[..., None]]] = deque()

    def add(self, then: Callable[..., None], *values: Tensor) -> None:
        """Call ``then`` with the values on the host, as soon as they and all earlier ones are there."""
        slots = [self._slot(value) for value in values]
        if not self._waiting and not any(isinstance(slot, _Slot) for slot in slots):
            then(*slots)
        else:
            self._waiting.append((slots, then))

    def _slot(self, value: Tensor) -> _Slot | NDArray[np.generic]:
        if value.device.type == "cpu":
            return _array(value)
        stream = devices.current_stream(value.device) if devices.has_async_copies(value.device) else None
        key = value.device, 0 if stream is None else stream.stream_id
        return self._batches.setdefault(key, _Batch(stream)).add(value)

    def settle(self, *, wait: bool) -> None:
        """Use the values that have arrived; ``wait`` for the others as well."""
        if self._batches and (wait or not devices.GATE.is_closed):
            batches, self._batches = self._batches, {}
            for batch in batches.values():
                batch.start()
        while self._waiting:
            slots, then = self._waiting[0]
            if not wait and not all(slot.is_done() for slot in slots if isinstance(slot, _Slot)):
                return
            self._waiting.popleft()
            then(*[slot.read() if isinstance(slot, _Slot) else slot for slot in slots])
