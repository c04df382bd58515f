"""Singular values of one matrix and what they say: a weight, a gradient, an update or a momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from backlight.measure.spectra.replicates import ReplicateError, as_matrix, named, promoted

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a p x q matrix, D = min(p, q).

    Attributes
    ----------
    values
        ``[D]``, descending, in the unit of the matrix.
    shape
        p, q.
    """

    values: Float64
    shape: tuple[int, int]

    @property
    def frobenius(self) -> float:
        """Root of the sum of squares of the values."""
        return float(np.linalg.norm(self.values))

    @property
    def stable_rank(self) -> float | None:
        """``sum s^2 / s_1^2``, between 1 and D; None for a zero matrix."""
        return stable_rank(self.values)

    @property
    def effective_rank(self) -> float | None:
        """``exp`` of the entropy of ``s / sum s``, between 1 and D; None for a zero matrix.

        Roy and Vetterli, "The effective rank" (EUSIPCO 2007).
        """
        total = float(np.sum(self.values))
        if total == 0:
            return None
        share = self.values[self.values > 0] / total
        return float(np.exp(-np.sum(share * np.log(share))))

    @property
    def gaps(self) -> Float64:
        """Differences of neighbouring values relative to the largest, ``[D - 1]``; empty for zero."""
        return gaps(self.values)

    @property
    def aspect_ratio(self) -> float:
        """D / max(p, q), in (0, 1]."""
        return aspect_ratio(*self.shape)


def spectrum(matrix: Tensor, *, layer: str = "") -> Spectrum:
    """Compute all singular values of a matrix, in float64.

    Parameters
    ----------
    matrix
        A weight, gradient, update or momentum with two dimensions, or a convolution, which is taken as
        outputs x everything else. Any floating type and device.
    layer
        What messages call it.

    Raises
    ------
    ReplicateError
        If it has fewer than two dimensions or holds NaN or infinite values.
    """
    a_pq = promoted(as_matrix(matrix.detach(), layer=layer))
    if not bool(torch.isfinite(a_pq).all()):
        raise ReplicateError(f"{named(layer)}: the matrix holds NaN or infinite values.")
    if a_pq.device.type == "mps":  # there is no float64 there
        a_pq = a_pq.cpu()
    s_D = torch.linalg.svdvals(a_pq.double())
    p, q = a_pq.shape
    return Spectrum(s_D.cpu().numpy(), (p, q))


def values_by_gram(matrix: Tensor, *, layer: str = "") -> Float64:
    """Compute the singular values of a matrix, ``[D]``, descending, by its smaller Gram in float64.

    Cheaper than :func:`spectrum`. Values below about 3e-8 of the largest are lost in it; they are NaN. A
    matrix in float32 holds no such values that rounding did not make. Parameters are those of
    :func:`spectrum`.

    Raises
    ------
    ReplicateError
        If it is no matrix, or holds NaN or infinite values.
    """
    a_pq = promoted(as_matrix(matrix.detach(), layer=layer))
    if not bool(torch.isfinite(a_pq).all()):
        raise ReplicateError(f"{named(layer)}: the matrix holds NaN or infinite values.")
    p, q = a_pq.shape
    if a_pq.device.type == "mps":  # there is no float64 there
        a_pq = a_pq.cpu()
    a_pq = (a_pq.T if p > q else a_pq).double()
    # Of one size, so that squares neither overflow nor vanish.
    top = float(a_pq.abs().max())
    if top == 0:
        return np.zeros(min(p, q))
    a_pq = a_pq / top
    squares = torch.linalg.eigvalsh(a_pq @ a_pq.T).flip(0).cpu().numpy()
    lost = squares < 4 * np.finfo(np.float64).eps * squares[0]
    values = np.sqrt(np.where(lost, 0.0, squares)) * top
    return np.where(lost, np.nan, values)


def stable_rank_of(matrix: Tensor, *, layer: str = "", power: int = 200) -> float | None:
    """Compute the stable rank of a matrix without its singular values; None for a zero matrix.

    The largest singular value comes from power iterations on a block of eight columns, in float64, until
    it moves by less than 1e-10 of itself. Parameters and errors are those of :func:`spectrum`; ``power``
    bounds the iterations.

    Raises
    ------
    ReplicateError
        If it is no matrix, or holds NaN or infinite values.
    """
    a_pq = promoted(as_matrix(matrix.detach(), layer=layer))
    square = float(torch.linalg.vector_norm(a_pq, dtype=torch.float64)) ** 2
    if not math.isfinite(square):
        raise ReplicateError(f"{named(layer)}: the matrix holds NaN or infinite values.")
    if square == 0:
        return None
    a_pq = (a_pq.T if a_pq.shape[0] > a_pq.shape[1] else a_pq).double()
    generator = torch.Generator().manual_seed(0)
    x_pb = torch.randn(a_pq.shape[0], min(8, a_pq.shape[0]), generator=generator, dtype=torch.float64)
    x_pb = torch.linalg.qr(x_pb.to(a_pq.device))[0]
    top = 0.0
    for _ in range(power):
        y_qb = a_pq.T @ x_pb
        before, top = top, float(torch.linalg.matrix_norm(y_qb, 2))
        if abs(top - before) <= 1e-10 * top:
            break
        x_pb = torch.linalg.qr(a_pq @ y_qb)[0]
    return square / top**2


def stable_rank(values: ArrayLike) -> float | None:
    """Return ``sum s^2 / s_1^2`` of singular values; None, not 0/0, where all are zero."""
    s = np.abs(np.asarray(values, dtype=np.float64))
    top = float(np.max(s, initial=0.0))
    return float(np.sum((s / top) ** 2)) if top > 0 else None


def gaps(values: ArrayLike) -> Float64:
    """Return ``(s_i - s_{i+1}) / s_1`` of descending singular values; empty where all are zero."""
    s = np.asarray(values, dtype=np.float64)
    if not s.size or s[0] == 0:
        return np.empty(0)
    return np.asarray(-np.diff(s) / s[0], dtype=np.float64)


def aspect_ratio(p: int, q: int) -> float:
    """Return the short side over the long one, in (0, 1]."""
    return min(p, q) / max(p, q)
