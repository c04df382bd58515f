"""Exponent histograms: how many values of each tensor lie in each power of two.

P tensors, B bins, E exponents of a type; R rows of W scalars. Exponents are read from the bits of a float,
so a power of two is exactly the lower end of its bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.devices import has_async_copies, widest_float
from backlight.measure.stats.kernels import SCRATCH
from backlight.measure.stats.packed_matrices import Owned, chunk_size, matrices, stored
from backlight.measure.transfer import Arrays, PendingArrays, Transfer, TransferBatch, start_copy
from backlight.series import HISTOGRAM_BINS, HISTOGRAM_LOWEST


class _Float(NamedTuple):
    """Position of the exponent in the bits of a type."""

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
    transfer: TransferBatch | None = None,
) -> PendingArrays:
    """Count the values of P local tensors by exponent; None where there is none, integers raise TypeError.

    Values are divided by ``scale`` before they are counted, on their device. ``transfer`` copies the results
    together with others of the same step; without one they are copied at once. The result is float64 ``[P,
    0]`` and int64 ``[P, 1 + bins]``, the columns of :data:`backlight.series.HISTOGRAM`. Zeros, NaN and
    infinities are in no bin. Of complex values the magnitude is counted.
    """
    size = len(tensors)
    times_P = np.zeros(size, dtype=np.int64)
    devices: dict[torch.device, dict[torch.dtype, Owned]] = {}
    transfers: list[Transfer] = []
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            for position, tensor in enumerate(tensors):
                if tensor is not None and not tensor.is_meta:
                    values, times_P[position] = stored(tensor)
                    kinds = devices.setdefault(values.device, {})
                    kinds.setdefault(values.dtype, []).append((position, values))
            enqueue = start_copy if transfer is None else transfer.add
            transfers = [enqueue(_count(kinds, size, device, scale)) for device, kinds in devices.items()]

    def finish(received: list[NDArray[np.generic]]) -> Arrays:
        counts = np.zeros((size, 1 + HISTOGRAM_BINS), dtype=np.int64)
        counts[:, 0] = times_P > 0
        for table in received:
            counts[:, 1:] += table.reshape(size, HISTOGRAM_BINS).astype(np.int64) * times_P[:, None]
        return np.zeros((size, 0)), counts

    return PendingArrays(transfers, finish)


def _count(
    kinds: dict[torch.dtype, Owned], size: int, device: torch.device, scale: Tensor | float | None
) -> Tensor:
    """Return int64 ``[P * HISTOGRAM_BINS]`` of one device."""
    counts_PB = torch.zeros((size, HISTOGRAM_BINS), dtype=torch.int64, device=device)
    if isinstance(scale, Tensor):
        scale = scale.detach().to(device, non_blocking=True)
    for dtype, owned in kinds.items():
        counts_PB += _count_of_type(owned, size, _kind(dtype, device, scale), scale)
    return counts_PB.view(-1)


def _count_of_type(owned: Owned, size: int, kind: _Float, scale: Tensor | float | None) -> Tensor:
    """Return int64 ``[P, HISTOGRAM_BINS]``.

    First all values are counted by the E possible values of their exponent bits. The highest is that of NaN
    and infinity, the lowest that of subnormal values and of zeros; the zeros are counted again and
    subtracted.
    """
    device = owned[0][1].device
    counts_PE = torch.zeros((size, kind.exponent + 1), dtype=torch.int64, device=device)
    zeros_P = torch.zeros(size, dtype=torch.int64, device=device)
    ones = torch.ones(chunk_size(device)[0], dtype=torch.int64, device=device)
    for matrix, owners in matrices(owned):
        x_RW = _values(matrix, kind, scale)
        shape = x_RW.shape
        owner_R = _on(device, np.repeat([o for o, _ in owners], [rows for _, rows in owners]))
        zero_RW = torch.eq(x_RW, 0, out=SCRATCH.take("zero", shape, kind.dtype, device))
        zeros_P.index_add_(0, owner_R, zero_RW.sum(1).to(torch.int64))
        field_RW = SCRATCH.take("field", shape, kind.bits, device)
        torch.bitwise_right_shift(x_RW.view(kind.bits), kind.mantissa, out=field_RW)
        index_RW = SCRATCH.take("index", shape, torch.int64, device)
        index_RW.copy_(field_RW.bitwise_and_(kind.exponent)).add_((owner_R * (kind.exponent + 1))[:, None])
        # Sums of integers do not depend on their order, on any device.
        counts_PE.view(-1).scatter_add_(0, index_RW.view(-1), ones[: x_RW.numel()])
    bin_E = torch.arange(kind.exponent, device=device) - (kind.bias + HISTOGRAM_LOWEST)
    bin_E.clamp_(0, HISTOGRAM_BINS - 1)
    counts_PB = torch.zeros((size, HISTOGRAM_BINS), dtype=torch.int64, device=device)
    counts_PB.index_add_(1, bin_E, counts_PE[:, :-1])
    counts_PB[:, 0] -= zeros_P
    return counts_PB


def _kind(dtype: torch.dtype, device: torch.device, scale: Tensor | float | None) -> _Float:
    """Return the type to count in: what float32 holds stays so, unless a division could leave its range."""
    narrow = dtype.itemsize <= 4 and not dtype.is_complex and scale is None
    return _SINGLE if narrow or widest_float(device) is torch.float32 else _DOUBLE


def _values(x_RW: Tensor, kind: _Float, scale: Tensor | float | None) -> Tensor:
    if x_RW.is_complex():
        parts_RWC = torch.view_as_real(x_RW.resolve_conj()).to(kind.dtype)
        x_RW = torch.hypot(parts_RWC[..., 0], parts_RWC[..., 1])
    x_RW = x_RW.to(kind.dtype)
    return x_RW if scale is None else x_RW / scale


def _on(device: torch.device, array: NDArray[np.int64]) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if has_async_copies(device) else tensor).to(device, non_blocking=True)
