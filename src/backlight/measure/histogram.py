"""How many values of each tensor lie in each power of two.

P tensors; R rows, W scalars in each. Exponents are read from the bits of a float, so a power of two is
exactly the lower end of its bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.carrier import Carrier
from backlight.measure.layout import stored
from backlight.measure.packing import Owned, batches
from backlight.measure.pending import Arrays, Pending, send

LOWEST = -40
"""Exponent of the first bin: bin i counts 2^(LOWEST+i) <= |g| < 2^(LOWEST+i+1)."""

BINS = 64
"""Number of bins; the first and the last also take what lies beyond."""

_DROPPED = BINS  # a bin more, for zeros and for what is not finite


class _Float(NamedTuple):
    """Where the exponent is in the bits of a type."""

    dtype: torch.dtype
    bits: torch.dtype
    mantissa: int
    exponent: int
    bias: int


_SINGLE = _Float(torch.float32, torch.int32, 23, 0xFF, 127)
_DOUBLE = _Float(torch.float64, torch.int64, 52, 0x7FF, 1023)


def histogram(
    tensors: Sequence[Tensor | None],
    *,
    scale: Tensor | float | None = None,
    carrier: Carrier | None = None,
) -> Pending:
    """Count the values of every tensor by exponent.

    Parameters
    ----------
    tensors
        P local tensors as for :func:`backlight.measure.statistics.statistics`; None where there is none.
    scale
        What the values are divided by before they are counted, on their device.
    carrier
        Takes the results along with others of the same step; without one they travel at once.

    Returns
    -------
    Pending
        float64 ``[P, 0]`` and int64 ``[P, 1 + BINS]``: measured (0 or 1), then the bins. Zeros, NaN and
        infinities are in no bin. Of complex values the magnitude is counted.

    Raises
    ------
    TypeError
        If a tensor holds integers.
    """
    size = len(tensors)
    times_P = np.zeros(size, dtype=np.int64)
    devices: dict[torch.device, dict[torch.dtype, Owned]] = {}
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            for position, tensor in enumerate(tensors):
                if tensor is not None and not tensor.is_meta:
                    values, times_P[position] = stored(tensor)
                    kinds = devices.setdefault(values.device, {})
                    kinds.setdefault(values.dtype, []).append((position, values))
            go = send if carrier is None else carrier.take
            flights = [go(_count(kinds, size, device, scale)) for device, kinds in devices.items()]
    else:
        flights = []

    def finish(arrived: list[NDArray[np.generic]]) -> Arrays:
        counts = np.zeros((size, 1 + BINS), dtype=np.int64)
        counts[:, 0] = times_P > 0
        for table in arrived:
            counts[:, 1:] += table.reshape(size, BINS + 1)[:, :BINS].astype(np.int64) * times_P[:, None]
        return np.zeros((size, 0)), counts

    return Pending(flights, finish)


def _count(
    kinds: dict[torch.dtype, Owned], size: int, device: torch.device, scale: Tensor | float | None
) -> Tensor:
    """Return int64 ``[P * (BINS + 1)]`` of one device."""
    counts = torch.zeros(size * (BINS + 1), dtype=torch.int64, device=device)
    if isinstance(scale, Tensor):
        scale = scale.detach().to(device, non_blocking=True)
    for owned in kinds.values():
        for matrix, owners in batches(owned, 2**17 if device.type == "cpu" else 2**22, 2**12):
            bin_RW = _bins(matrix, scale)
            first = np.repeat([owner * (BINS + 1) for owner, _ in owners], [rows for _, rows in owners])
            first_R = torch.from_numpy(first)
            if device.type != "cpu":
                first_R = first_R.pin_memory() if device.type == "cuda" else first_R
                first_R = first_R.to(device, non_blocking=True)
            place_N = bin_RW.add_(first_R[:, None]).view(-1)
            # Sums of integers do not depend on their order, on any device.
            counts.scatter_add_(0, place_N, torch.ones_like(place_N))
    return counts


def _bins(x_RW: Tensor, scale: Tensor | float | None) -> Tensor:
    """Return int64 ``[R, W]``, the bin of each value."""
    narrow = x_RW.dtype.itemsize <= 4 and not x_RW.is_complex() and scale is None
    kind = _SINGLE if narrow or x_RW.device.type == "mps" else _DOUBLE
    if x_RW.is_complex():
        parts_RWC = torch.view_as_real(x_RW.resolve_conj()).to(kind.dtype)
        x_RW = torch.hypot(parts_RWC[..., 0], parts_RWC[..., 1])
    x_RW = x_RW.to(kind.dtype)
    if scale is not None:
        x_RW = x_RW / scale
    field_RW = (x_RW.view(kind.bits) >> kind.mantissa).bitwise_and_(kind.exponent)
    dropped_RW = (x_RW == 0).logical_or_(field_RW == kind.exponent)
    bin_RW = (field_RW - (kind.bias + LOWEST)).clamp_(0, BINS - 1)
    return bin_RW.masked_fill_(dropped_RW, _DROPPED).to(torch.int64)
