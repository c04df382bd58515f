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
from backlight.measure.rows import SCRATCH

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
    """Yield the scalars of tensors of one type and device as matrices of about :func:`piece_size`.

    ``values`` holds pairs of an owner and its stored values; small tensors get rows of
    :data:`SMALL_ROW`. A matrix is valid until the next one is asked for.
    """
    if not values:
        return
    size, width = piece_size(values[0][1].device)
    small: Owned = []
    for owner, tensor in values:
        if tensor.numel() < min(SMALL, size):
            small.append((owner, tensor))
            continue
        for piece in pieces(tensor, size):
            whole = piece.numel() // width * width
            if whole:
                yield Batch(piece[:whole].view(-1, width), [(owner, whole // width)])
            if whole < piece.numel():
                small.append((owner, piece[whole:]))
    yield from _together(small, size // SMALL_ROW)


def _together(small: Owned, size: int) -> Iterator[Batch]:
    """Yield matrices of at most ``size`` rows, or as many as one tensor needs."""
    parts: list[Tensor] = []
    owners: list[tuple[int, int]] = []
    used = 0
    padding: dict[int, Tensor] = {}
    for owner, tensor in small:
        scalars = tensor.numel()
        rows = -(-scalars // SMALL_ROW)
        if used and used + rows > size:
            yield Batch(_joined(parts, used), owners)
            parts, owners, used = [], [], 0
        parts.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
        owners.append((owner, rows))
        used += rows
        missing = rows * SMALL_ROW - scalars
        if missing:
            if missing not in padding:
                padding[missing] = tensor.new_zeros(missing)
            parts.append(padding[missing])
    if used:
        yield Batch(_joined(parts, used), owners)


def _joined(parts: list[Tensor], rows: int) -> Tensor:
    first = parts[0]
    buffer = SCRATCH.take("packed", rows * SMALL_ROW, first.dtype, first.device)
    return torch.cat(parts, out=buffer).view(rows, SMALL_ROW)


def large_share(values: Owned) -> float:
    """Return which share of all scalars is in tensors that are not small."""
    sizes = [tensor.numel() for _, tensor in values]
    return sum(size for size in sizes if size >= SMALL) / max(sum(sizes), 1)
