"""Kernels of torch's own operations, a matrix in and numbers per row out.

R rows of W scalars. Rows may be padded with zeros, which change no number here: non-zero values are counted,
not zeros. The kernels never read a value on the host; the functions on numpy arrays, which join numbers of
rows to those of tensors, run there. On the host :mod:`backlight.measure.stats.compiled_rows` gives the same
numbers in one pass.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_COUNTED = 2**22  # scalars whose booleans are in memory at once


def promoted(tensor: Tensor) -> Tensor:
    """Return 16-bit floating values as float32, in which products can be summed; else the tensor."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


class Partials(NamedTuple):
    """Numbers per row, each ``[R]``; those of complex rows are of the magnitudes.

    ``total`` is the sum of the values, of complex ones the sum of the real parts.
    """

    norm: Tensor
    max_abs: Tensor
    total: Tensor
    nonzero: Tensor


class Scratch(threading.local):
    """Buffers on the host that every pass of a thread reuses.

    Fresh memory costs a page fault per 4 KiB, more than the arithmetic on it. On an accelerator torch caches
    memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of that shape, valid until the same use asks again in this thread."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        key = (use, dtype)
        view = self._views.get(key)
        if view is None or view.shape != shape or view.is_inference() != torch.is_inference_mode_enabled():
            view = self._view(key, shape, device)
        return view

    def _view(self, key: tuple[str, torch.dtype], shape: tuple[int, ...], device: torch.device) -> Tensor:
        size = math.prod(shape)
        block = self._buffers.get(key)
        if block is None or block.numel() < size or block.is_inference() != torch.is_inference_mode_enabled():
            block = torch.empty(size, dtype=key[1], device=device)
        view = block[:size].view(shape)
        if type(block) is Tensor:  # a mode of the user may return another type
            self._buffers[key], self._views[key] = block, view
        return view

    def drop(self) -> None:
        """Free the buffers of this thread."""
        self._buffers.clear()
        self._views.clear()


SCRATCH = Scratch()
"""The buffers of this process: a few MiB for each thread that measures."""


def narrow(x_RW: Tensor) -> Partials:
    """Measure rows of float32 or less: the square of such a value always fits float64."""
    shape, device = x_RW.shape, x_RW.device
    wide_RW = SCRATCH.take("wide", shape, torch.float64, device).copy_(x_RW)
    norm_R = torch.linalg.vector_norm(wide_RW, dim=1)
    total_R = wide_RW.sum(1)
    abs_RW = SCRATCH.take("abs", shape, torch.float32, device)
    if x_RW.dtype is torch.float32:
        torch.abs(x_RW, out=abs_RW)
    else:
        abs_RW.copy_(x_RW).abs_()
    max_R = abs_RW.amax(1)
    # A comparison within floats is vectorised, one into booleans is not: a third of the time.
    nonzero_R = abs_RW.ne_(0).sum(1)
    return Partials(norm_R, max_R, total_R, nonzero_R)


def wide(x_RW: Tensor, accumulator: torch.dtype = torch.float64) -> Partials:
    """Measure rows whose squares the accumulator may not hold: float64, complex, or a device without float64.

    Each row is multiplied by a power of two that brings its largest value near 1, so that no square that
    matters is lost at either end.
    """
    parts_RWC = _parts(x_RW).to(accumulator)
    scaled_RWC, down_R = _near_one(parts_RWC)
    norm_R = torch.linalg.vector_norm(scaled_RWC, dim=(1, 2)) / down_R
    if x_RW.is_complex():
        max_R = scaled_RWC.square().sum(-1).amax(1).sqrt() / down_R
    else:
        max_R = parts_RWC.abs().amax((1, 2))
    total_R = scaled_RWC[..., 0].sum(1) / down_R
    nonzero_R = (parts_RWC != 0).any(-1).sum(1).to(accumulator)
    return Partials(norm_R, max_R, total_R, nonzero_R)


def row_norms(x_RW: Tensor) -> Tensor:
    """Return the L2 norm of each row ``[R]`` of values in their widest type, at any magnitude."""
    scaled_RWC, down_R = _near_one(_parts(x_RW))
    norm_R: Tensor = torch.linalg.vector_norm(scaled_RWC, dim=(1, 2)) / down_R
    return norm_R


def non_finite(x_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Count NaN and infinite values per row; a complex value is NaN or infinite if either part is."""
    rows, width = x_RW.shape
    nan_R = torch.zeros(rows, dtype=torch.int64, device=x_RW.device)
    inf_R = torch.zeros_like(nan_R)
    for x_RV in torch.split(x_RW, max(1, min(width, _COUNTED // rows)), 1):
        part_RV = x_RV.to(torch.float32) if x_RV.dtype.itemsize == 1 else x_RV
        nan_R += torch.isnan(part_RV).sum(1)
        inf_R += torch.isinf(part_RV).sum(1)
    return nan_R, inf_R


def _parts(x_RW: Tensor) -> Tensor:
    """Return real values ``[R, W, 1]``, or real and imaginary parts ``[R, W, 2]``."""
    return torch.view_as_real(x_RW.resolve_conj()) if x_RW.is_complex() else x_RW.unsqueeze(-1)


def _near_one(parts_RWC: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows multiplied by powers of two that bring their largest value near 1, and those powers."""
    down_R = _reciprocal_power_of_two(parts_RWC.abs().amax((1, 2)))
    return parts_RWC * down_R[:, None, None], down_R


def _reciprocal_power_of_two(top_R: Tensor) -> Tensor:
    """Return 2^-e with 2^(e-1) <= top < 2^e, kept within normal numbers; 1 for infinity and NaN."""
    exponent_R = torch.frexp(torch.nan_to_num(top_R, nan=1.0, posinf=1.0)).exponent
    # The power is put together from its bits: torch.ldexp overflows on the way for subnormal values.
    if top_R.dtype is torch.float64:
        bits_R = (1023 - exponent_R.to(torch.int64).clamp(-1000, 1000)) << 52
    else:
        bits_R = (127 - exponent_R.to(torch.int32).clamp(-120, 120)) << 23
    return bits_R.view(top_R.dtype)


Float64 = NDArray[np.float64]


def root_sum_squares(values: ArrayLike, axis: int | None = None) -> Float64:
    """Return the root of the sum of squares of ``values`` along ``axis`` (all of them by default).

    Values are divided by a power of two near the largest one, so neither 1e300 nor 1e-300 is lost. NaN stays
    NaN, also next to an infinity; the result for no values is 0.
    """
    array = np.abs(np.asarray(values, dtype=np.float64))
    top = np.max(array, axis=axis, keepdims=True, initial=0.0)
    exponent = _exponent(top)
    with np.errstate(over="ignore"):
        squares = np.square(np.ldexp(array, -exponent))
        root = np.ldexp(np.sqrt(np.sum(squares, axis=axis, keepdims=True)), exponent)
    result = np.where(np.isfinite(top), root, top)
    return np.asarray(np.squeeze(result, axis=axis), dtype=np.float64)


def root_sum_squares_by(owner: NDArray[np.int64], values: Float64, owners: int) -> Float64:
    """Return ``[owners]``: the root of the sum of squares of each owner's values, 0 for no values."""
    array = np.abs(values)
    top = max_by(owner, array, owners)
    exponent = _exponent(top)
    with np.errstate(over="ignore"):
        squares = np.square(np.ldexp(array, -exponent[owner]))
        root = np.ldexp(np.sqrt(np.bincount(owner, squares, owners)), exponent)
    return np.where(np.isfinite(top), root, top)


def max_by(owner: NDArray[np.int64], values: Float64, owners: int) -> Float64:
    """Return ``[owners]``: the largest of each owner's non-negative values; NaN wins, 0 for no values."""
    top = np.zeros(owners)
    with np.errstate(invalid="ignore"):  # a NaN is an answer here
        np.maximum.at(top, owner, values)
    return top


def _exponent(top: Float64) -> NDArray[np.int32]:
    return np.asarray(np.frexp(np.where(np.isfinite(top), top, 1.0))[1], dtype=np.int32)
