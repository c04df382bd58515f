"""Norm, largest magnitude, sum and counts of every tensor of a list, in one pass over the memory.

P tensors. What fp32 cannot hold (squares overflow above 1.8e19 and vanish below 1e-23) is accumulated
in float64, and float64 itself with scaled squares, so that no value has to be looked at twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from backlight.measure.layout import CHUNK, Flat, pieces, stored
from backlight.measure.norms import root_sum_squares
from backlight.measure.pending import Part, Pending

FLOATS = ("norm", "max_abs", "sum")
"""Names of the float64 columns, in order."""

INTEGERS = ("measured", "numel", "zeros", "nan", "inf")
"""Names of the int64 columns, in order."""

Tier = Literal["auto", "eager", "compiled"]

_LARGE, _SMALL = 1e140, 1e-140


def statistics(
    tensors: Sequence[Tensor | None], *, tier: Tier = "auto", scale: Tensor | float | None = None
) -> Pending:
    """Measure every tensor.

    Parameters
    ----------
    tensors
        P local tensors of any floating or complex type, layout, stride and device; None where there is
        nothing to measure.
    tier
        ``"eager"`` uses torch's own operations, ``"compiled"`` a kernel of ``torch.compile`` (eager
        where that fails, see :func:`why_not_compiled`), ``"auto"`` the faster one for this list.
    scale
        What all values are to be divided by, a loss scale for example. The results are divided, not
        the tensors; a tensor on a device is not read by the host.

    Returns
    -------
    Pending
        float64 ``[P, 3]`` in the order of :data:`FLOATS` and int64 ``[P, 5]`` in that of :data:`INTEGERS`.
        ``norm`` and ``max_abs`` are NaN where any value is NaN, else infinite where any is infinite.
        Of complex values they are those of the magnitude, and ``sum`` is the sum of the real parts.
        An empty tensor is measured: norm, max_abs and sum are 0.
    """
    rows = len(tensors)
    bits = torch.zeros((rows, len(FLOATS) + len(INTEGERS)), dtype=torch.int64)
    table = bits.numpy()
    floats = table[:, : len(FLOATS)].view(np.float64)
    with torch.no_grad():
        for row, tensor in enumerate(tensors):
            if tensor is None:
                continue
            floats[row], table[row, len(FLOATS) :] = _eager(stored(tensor), tensor.numel())
        if scale is not None:
            floats /= float(scale)
    return Pending(rows, len(FLOATS), len(INTEGERS), [Part(np.arange(rows), bits)])


def _eager(flat: Flat, scalars: int) -> tuple[tuple[float, float, float], tuple[int, int, int, int, int]]:
    norms, largest, total, nonzero, nan, inf = [], 0.0, 0.0, 0, 0, 0
    scratch = torch.empty(min(CHUNK, flat.values.numel()), dtype=torch.float64)
    for piece in pieces(flat.values):
        real = torch.view_as_real(piece.resolve_conj()) if piece.is_complex() else piece
        if real.is_cuda or real.dtype.itemsize == 1:
            real = real.float()
        values = scratch[: piece.numel()].copy_(piece.real if piece.is_complex() else piece)
        total += float(values.sum())
        if piece.is_complex():
            values = scratch[: piece.numel()].copy_(piece.to(torch.complex128).abs())
        low, high = (float(v) for v in values.aminmax())
        top = float(np.maximum(-low, high))
        if not np.isfinite(top):
            bad_nan, bad_inf = torch.isnan(real), torch.isinf(real)
            if piece.is_complex():
                bad_nan, bad_inf = bad_nan.any(-1), bad_inf.any(-1)
            nan += int(bad_nan.sum())
            inf += int(bad_inf.sum())
            norms.append(top)
        elif top and not _SMALL < top < _LARGE:
            unit = 2.0 ** np.frexp(top)[1]
            norms.append(float(torch.linalg.vector_norm(values / unit)) * unit)
        else:
            norms.append(float(torch.dot(values, values)) ** 0.5)
        largest = float(np.maximum(largest, top))
        nonzero += int(torch.count_nonzero(values))
    norm = float(root_sum_squares(np.array(norms))) * flat.times**0.5
    if nan:
        norm = largest = float("nan")
    zeros = flat.times * (flat.values.numel() - nonzero) + flat.absent
    return (norm, largest, total * flat.times), (1, scalars, zeros, nan * flat.times, inf * flat.times)
