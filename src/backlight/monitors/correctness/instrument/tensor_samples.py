"""Samples of the values of tensors and batches, small enough to be compared at every step."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backlight.capture.batches import leaves

VALUES = 256
"""Values of a tensor that stand for it."""

GOLDEN = 0.6180339887498949
"""Fractional part of the golden ratio: its multiples are spread evenly, and follow no row of a tensor."""


@functools.lru_cache(maxsize=64)
def places(size: int) -> Tensor:
    """Return up to ``VALUES`` places in a tensor of ``size`` elements; equal steps may meet one pixel."""
    if size <= VALUES:
        return torch.arange(size, device="cpu")
    return ((torch.arange(VALUES, dtype=torch.float64, device="cpu") * GOLDEN).frac() * size).long()


def sampled(tensor: Tensor) -> Tensor:
    """Return values of a strided tensor, on its device."""
    tensor = tensor.detach()
    return torch.take(tensor, places(tensor.numel()).to(tensor.device, non_blocking=True))


def digest(batch: Any) -> str | None:
    """Return a digest of a sample of a batch's values; None where something in it cannot be read."""
    found = hashlib.blake2b(digest_size=8)
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                return None
            found.update(repr((tuple(leaf.shape), sampled(leaf).tolist())).encode())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            index = places(leaf.size).numpy()
            found.update(repr(leaf.shape).encode() + leaf.flat[index].tobytes())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, bool)):
            found.update(repr(leaf).encode())
        else:
            return None
    return found.hexdigest()
