"""Singular values and stable rank of one matrix, and how far a subspace has moved between two steps.

A matrix is a weight, gradient, update or momentum of shape p x q, or a convolution as outputs x everything
else; D = min(p, q). docs/formulas.md, section 2.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from backlight.devices import widest_float
from backlight.measure.spectra.replicates import ReplicateError, as_matrix, named, sum_squares
from backlight.measure.stats.kernels import promoted

_MAX_ITERATIONS = 200
_COLUMNS = 8


def singular_values(matrix: Tensor, *, layer: str = "") -> NDArray[np.float64]:
    """Return the singular values of a matrix, ``[D]``, descending, by its smaller Gram in float64.

    Values below about 3e-8 of the largest are lost in a Gram; they are NaN. A matrix in float32 holds no such
    values that rounding did not make. A matrix with NaN or infinite values raises ReplicateError.
    """
    a_pq = _wide(matrix, layer)[0]
    # Scaled to 1, so that squares neither overflow nor vanish.
    top = float(a_pq.abs().max())
    if top == 0:
        return np.zeros(a_pq.shape[0])
    a_pq = a_pq / top
    squares = torch.linalg.eigvalsh(a_pq @ a_pq.T).flip(0).cpu().numpy()
    lost = squares < 4 * np.finfo(np.float64).eps * squares[0]
    values = np.sqrt(np.where(lost, 0.0, squares)) * top
    return np.where(lost, np.nan, values)


def stable_rank(matrix: Tensor, *, layer: str = "") -> float | None:
    """Return ``sum s^2 / s_1^2`` of a matrix without its singular values; None, not 0/0, for a zero matrix.

    The largest singular value comes from power iterations on a block of eight columns, in float64, until it
    changes by less than 1e-10 of itself. A matrix with NaN or infinite values raises ReplicateError.
    """
    a_pq, square = _wide(matrix, layer)
    if square == 0:
        return None
    generator = torch.Generator().manual_seed(0)
    x_pb = torch.randn(a_pq.shape[0], min(_COLUMNS, a_pq.shape[0]), generator=generator, dtype=torch.float64)
    x_pb = torch.linalg.qr(x_pb.to(a_pq.device))[0]
    top = 0.0
    for _ in range(_MAX_ITERATIONS):
        y_qb = a_pq.T @ x_pb
        before, top = top, float(torch.linalg.matrix_norm(y_qb, 2))
        if abs(top - before) <= 1e-10 * top:
            break
        x_pb = torch.linalg.qr(a_pq @ y_qb)[0]
    return square / top**2


def stable_rank_of_values(values: ArrayLike) -> float | None:
    """Return ``sum s^2 / s_1^2`` of singular values; None, not 0/0, where all are zero."""
    s = np.abs(np.asarray(values, dtype=np.float64))
    top = float(np.max(s, initial=0.0))
    return float(np.sum((s / top) ** 2)) if top > 0 else None


def _wide(matrix: Tensor, layer: str) -> tuple[Tensor, float]:
    """Return the matrix in float64 with its short side first, and its sum of squares."""
    a_pq = promoted(as_matrix(matrix.detach(), layer=layer))
    square = sum_squares(a_pq)
    if not math.isfinite(square):
        raise ReplicateError(f"{named(layer)}: the matrix holds NaN or infinite values.")
    if widest_float(a_pq.device) is torch.float32:
        a_pq = a_pq.cpu()
    return (a_pq.T if a_pq.shape[0] > a_pq.shape[1] else a_pq).double(), square


def subspace_overlap(before_nk: Tensor, after_nk: Tensor) -> float:
    """Return the mean squared cosine of the principal angles between two spans of orthonormal columns.

    1 for the same subspace; k / n is expected of two random ones. In float64: Bjorck and Golub, "Numerical
    methods for computing angles between linear subspaces", Math. Comp. 27 (1973).

    Raises
    ------
    ValueError
        If the shapes differ, there is no direction, or the columns are not orthonormal (to 1e-3).
    """
    if before_nk.ndim != 2 or before_nk.shape != after_nk.shape or not before_nk.numel():
        raise ValueError(
            f"expected two matrices [n, k] of one shape, got {tuple(before_nk.shape)} and "
            f"{tuple(after_nk.shape)}"
        )
    one, other = before_nk.double(), after_nk.double()
    for name, columns in (("before", one), ("after", other)):
        excess = columns.T @ columns - torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
        if not float(excess.abs().max()) < 1e-3:
            raise ValueError(f"the columns of {name!r} are not orthonormal")
    return float(torch.linalg.svdvals(one.T @ other).clamp(max=1.0).square().mean())
