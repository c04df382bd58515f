"""Samples of the values of tensors and batches, small enough to be compared at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.batches import leaves
from backlight.measure.stats.update import stride

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
            ends = np.cumsum([self._sizes[number] for number in group])
            for number, part in zip(group, np.split(table, ends[:-1]), strict=True):
                self.arrays[number] = part


def digest(batch: Any) -> str | None:
    """Return a digest of a sample of a batch's values; None where something in it cannot be read."""
    found = hashlib.blake2b(digest_size=8)
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                return None
            found.update(repr((tuple(leaf.shape), sampled(leaf).tolist())).encode())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            found.update(repr(leaf.shape).encode() + leaf.flat[:: places(leaf.size).step].tobytes())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, bool)):
            found.update(repr(leaf).encode())
        else:
            return None
    return found.hexdigest()
