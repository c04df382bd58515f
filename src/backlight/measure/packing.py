"""Flat values of many tensors as few matrices: small tensors share one, large ones are cut into several.

A launch per tensor costs more than the arithmetic of a bias. So small tensors are copied side by side
into one buffer, each padded with zeros to whole rows, and large ones are viewed in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from backlight.measure.layout import pieces

SMALL_ROW = 256
"""Width of the rows that small tensors are padded to."""

SMALL = 2**15
"""Tensors below this many scalars are copied together with others; above, a copy costs more than it saves."""


Owned = list[tuple[int, Tensor]]
"""Stored values with the position of the tensor that they are of."""


class Batch(NamedTuple):
    """A matrix ``[R, W]`` and, in order, the tensor that owns its rows with how many rows those are."""

    rows: Tensor
    owners: list[tuple[int, int]]


def batches(values: Owned, size: int, width: int) -> Iterator[Batch]:
    """Yield the scalars of tensors of one type and device as matrices of at most ``size`` scalars.

    ``values`` holds pairs of an owner and its stored values. Large tensors get rows of ``width``, small
    ones of :data:`SMALL_ROW`. A matrix is valid until the next one is asked for.
    """
    small: Owned = []
    for owner, tensor in values:
        scalars = tensor.numel()
        if scalars < SMALL:
            if scalars:
                small.append((owner, tensor.reshape(-1)))
            continue
        for piece in pieces(tensor, size):
            whole = piece.numel() // width * width
            if whole:
                yield Batch(piece[:whole].view(-1, width), [(owner, whole // width)])
            if whole < piece.numel():
                small.append((owner, piece[whole:]))
    yield from _together(small, size)


def _together(small: Owned, size: int) -> Iterator[Batch]:
    if not small:
        return
    first = small[0][1]
    padding = torch.zeros(SMALL_ROW, dtype=first.dtype, device=first.device)
    buffer: Tensor | None = None
    position = 0
    while position < len(small):
        owners: list[tuple[int, int]] = []
        parts: list[Tensor] = []
        rows = 0
        while position < len(small):
            owner, values = small[position]
            needed = -(-values.numel() // SMALL_ROW)
            if rows and (rows + needed) * SMALL_ROW > size:
                break
            owners.append((owner, needed))
            parts.append(values)
            if needed * SMALL_ROW > values.numel():
                parts.append(padding[: needed * SMALL_ROW - values.numel()])
            rows += needed
            position += 1
        if buffer is None:
            left = sum(-(-values.numel() // SMALL_ROW) for _, values in small) * SMALL_ROW
            buffer = torch.empty(
                min(max(size, rows * SMALL_ROW), left), dtype=first.dtype, device=first.device
            )
        packed = torch.cat(parts, out=buffer[: rows * SMALL_ROW])
        yield Batch(packed.view(rows, SMALL_ROW), owners)


def large_share(values: Owned) -> float:
    """Return which share of all scalars is in tensors that are not small."""
    sizes = [tensor.numel() for _, tensor in values]
    return sum(size for size in sizes if size >= SMALL) / max(sum(sizes), 1)
