"""Flat values of many tensors as few matrices: small tensors share one, large ones are cut into several.

A launch per tensor costs more than the arithmetic of a bias. So small tensors are copied side by side
into one buffer, each padded with zeros to whole rows, and large ones are viewed in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from backlight.measure.stats.kernels import SCRATCH
from backlight.measure.stats.layout import pieces

SMALL_ROW = 256
"""Width of the rows that small tensors are padded to."""

SMALL = 2**17
"""Tensors below this many scalars are copied together with others; from here on a copy, or eager work
instead of a call of the compiled kernel, costs more than it saves."""

Owned = list[tuple[int, Tensor]]
"""Stored values with the position of the tensor that they are of."""


class Batch(NamedTuple):
    """A matrix ``[R, W]`` and, in order, the tensor that owns its rows with how many rows those are."""

    rows: Tensor
    owners: list[tuple[int, int]]


def piece_size(device: torch.device) -> tuple[int, int]:
    """Return how many scalars are handled at once, and how many in one row.

    On one thread a piece in float64 still fits the second-level cache. On several it stays below the size
    from which torch wakes other threads for each operation: for so little work that takes longer.
    """
    if device.type != "cpu":
        return 2**22, 2**16
    return (2**18 if torch.get_num_threads() == 1 else 7 * 2**12), 2**12


def batches(values: Owned) -> Iterator[Batch]:
    """Yield the scalars of tensors of one type and device as matrices of at most :func:`piece_size`.

    ``values`` holds pairs of an owner and its stored values. A matrix is valid until the next one is
    asked for.
    """
    if not values:
        return
    size, width = piece_size(values[0][1].device)
    together = _Together(size)
    for owner, tensor in values:
        small = tensor.numel() < min(SMALL, size)
        for piece in (
            (tensor if tensor.dim() == 1 else tensor.reshape(-1),) if small else pieces(tensor, size)
        ):
            if piece.numel() == size:
                yield Batch(piece.view(-1, width), [(owner, size // width)])
                continue
            if together.is_full_for(piece):
                yield together.batch()
            together.add(owner, piece)
    if together.rows:
        yield together.batch()


class _Together:
    """Flat values of several tensors side by side, each padded with zeros to whole rows."""

    def __init__(self, size: int) -> None:
        self.rows = 0
        self._most = size // SMALL_ROW
        self._parts: list[Tensor] = []
        self._owners: list[tuple[int, int]] = []
        self._padding: dict[int, Tensor] = {}

    def is_full_for(self, values: Tensor) -> bool:
        """Tell whether what is here must go before ``values`` can be added."""
        return self.rows > 0 and self.rows - (-values.numel() // SMALL_ROW) > self._most

    def add(self, owner: int, values: Tensor) -> None:
        """Take flat values along; nothing is copied yet."""
        scalars = values.numel()
        rows = -(-scalars // SMALL_ROW)
        self.rows += rows
        self._parts.append(values)
        self._owners.append((owner, rows))
        missing = rows * SMALL_ROW - scalars
        if missing:
            if missing not in self._padding:
                self._padding[missing] = values.new_zeros(missing)
            self._parts.append(self._padding[missing])

    def batch(self) -> Batch:
        """Copy what is here into one matrix, and begin anew."""
        first = self._parts[0]
        buffer = SCRATCH.take("packed", (self.rows * SMALL_ROW,), first.dtype, first.device)
        batch = Batch(torch.cat(self._parts, out=buffer).view(self.rows, SMALL_ROW), self._owners)
        self.rows, self._parts, self._owners = 0, [], []
        return batch


def large_share(values: Owned) -> float:
    """Return which share of all scalars is in tensors that are not small."""
    sizes = [tensor.numel() for _, tensor in values]
    return sum(size for size in sizes if size >= SMALL) / max(sum(sizes), 1)
