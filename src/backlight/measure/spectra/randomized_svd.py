"""The strongest singular directions of a batch of matrices, without the others.

Block Golub-Kahan-Lanczos from a random block, with full reorthogonalisation: Golub, Luk and Overton, ACM
Trans. Math. Softw. 7 (1981); that a random block is a good start: Musco and Musco, arXiv:1504.05477. C
matrices of p x q with p <= q, blocks of b columns, m columns in all. The projected matrix B is kept whole
and in float64, nothing is squared, and the residual ``|A v - s u|`` is a by-product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from backlight.devices import widest_float
from backlight.measure.spectra.replicates import ReplicateError, as_matrix, named, sum_squares
from backlight.measure.stats.kernels import promoted

# Singular values and stable rank of one matrix, and how far a subspace has moved between two steps.
#
# A matrix is a weight, gradient, update or momentum of shape p x q, or a convolution as outputs x everything
# else; D = min(p, q). docs/formulas.md, section 2.

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
    before, other = before_nk.double(), after_nk.double()
    for name, columns in (("before", before), ("after", other)):
        excess = columns.T @ columns - torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
        if not float(excess.abs().max()) < 1e-3:
            raise ValueError(f"the columns of {name!r} are not orthonormal")
    return float(torch.linalg.svdvals(before.T @ other).clamp(max=1.0).square().mean())


# Residual over singular value from which on a direction below the edge is taken to stay there.
_SETTLED = 0.05


@dataclass(frozen=True)
class Directions:
    """The K strongest singular directions of C matrices."""

    left: Tensor  # [C, p, K], unit columns
    values: Tensor  # float64 [C, K], descending
    right: Tensor  # [C, q, K], unit columns
    residual: Tensor  # float64 [C, K]: |A v - s u|, or |A^T u - s v| where the left side is long
    converged: Tensor  # bool [C]: every requested direction above the edge passed its check
    columns: int = 0  # columns that the search needed; 0 without a search

    def part(self, c: int) -> Directions:
        """Return the directions of one of the matrices, C = 1."""
        left, values, right, residual, converged = (x[c : c + 1] for x in self.tensors())
        return Directions(left, values, right, residual, converged)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the fields."""
        return self.left, self.values, self.right, self.residual, self.converged


def joined(parts: Sequence[Directions]) -> Directions:
    """Return the directions of several batches as one."""
    columns = zip(*(part.tensors() for part in parts), strict=True)
    left, values, right, residual, converged = (torch.cat(column) for column in columns)
    return Directions(left, values, right, residual, converged)


def strongest(
    A_Cpq: Tensor,
    count: int,
    *,
    edge: float = 0.0,
    wanted: int | None = None,
    start_pb: Tensor | None = None,
    tolerance: float = 0.01,
    width: int = 32,
    columns: int = 512,
    expected: int = 0,
) -> Directions:
    """Compute the ``count`` <= p strongest directions of each matrix in float32 or float64.

    The search ends when the first ``wanted`` directions (all by default) have converged or lie below
    ``edge``, among those of the noise, or at ``columns`` columns of all blocks. ``tolerance`` is the largest
    residual over the distance to the next singular value: it bounds the sine of the angle to the true
    direction (Davis-Kahan, Wedin). ``start_pb`` are columns to start with, completed to a block of ``width``
    by random ones, the same for every matrix, so that results do not depend on the batch; a
    start biases an unfinished direction towards itself. ``expected`` columns sufficed for matrices like
    these: there is no check much before.
    """
    C, p, _ = A_Cpq.shape
    wanted = min(count if wanted is None else wanted, count)
    b = min(p, max(width, 0 if start_pb is None else start_pb.shape[1]))
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(p, b, generator=generator, dtype=torch.float64).to(A_Cpq)
    if start_pb is not None:
        X[:, : start_pb.shape[1]] = start_pb.to(X)
    X_Cpb = torch.linalg.qr(X)[0].expand(C, p, b)
    limit = min(p, max(columns, count + b))
    left, right = _Basis(A_Cpq, p, limit), _Basis(A_Cpq, A_Cpq.shape[2], limit)
    B_Cmm = torch.zeros(C, limit, limit, dtype=torch.float64, device=A_Cpq.device)
    checked = 0
    while True:
        begin, end = left.size, left.size + X_Cpb.shape[2]
        left.add(X_Cpb)
        # A^T X = P B^T: coefficients on the right basis, and the new block of it.
        along, P_Cqb, R_Cbb = right.extend(torch.matmul(X_Cpb.mT, A_Cpq).mT)
        if begin:
            B_Cmm[:, begin:end, :begin] = along.mT.double()
        B_Cmm[:, begin:end, begin:end] = R_Cbb.mT.double()
        right.add(P_Cqb)
        # A P = X B + X' R': the next block, and what is missing from the projection so far.
        along, X_Cpb, R_Cbb = left.extend(torch.matmul(A_Cpq, P_Cqb))
        B_Cmm[:, :end, begin:end] = along.double()
        full = end == limit
        # The projected problem grows with every block: it is solved when it has grown by a fifth.
        due = end >= max(count, 1.2 * checked) and end + b >= expected
        if full or due:
            checked = end
            y, s, z = _projected(B_Cmm[:, :end, :end], min(count + 1, end), A_Cpq.dtype)
            missing = torch.linalg.vector_norm(torch.matmul(R_Cbb.double(), z[:, begin:end]), dim=1)
            if end == p:
                missing = torch.zeros_like(missing)
            good = _passed(s, missing, wanted, edge, tolerance, A_Cpq.dtype)
            if full or bool(good.all()):
                break
        X_Cpb = X_Cpb[..., : limit - end]
    y_Cmk, z_Cmk = y[..., :count].to(A_Cpq.dtype), z[..., :count].to(A_Cpq.dtype)
    return Directions(
        torch.matmul(left.columns, y_Cmk),
        s[:, :count],
        torch.matmul(right.columns, z_Cmk),
        missing[:, :count],
        good,
        end,
    )


def resolved(values_CK: Tensor, residual_CK: Tensor, edge: float, tolerance: float) -> Tensor:
    """Return which directions have converged, bool ``[C, K]``, given one more singular value than needed.

    Those at least ``residual / tolerance`` away from the next singular value; noise begins at the edge.
    """
    down = values_CK - torch.nn.functional.pad(values_CK[:, 1:], (0, 1)).clamp(min=0)
    up = torch.nn.functional.pad(values_CK[:, :-1], (1, 0), value=torch.inf) - values_CK
    to_edge = torch.where(values_CK > edge, values_CK - edge, torch.inf)
    return residual_CK <= tolerance * torch.minimum(torch.minimum(down, up), to_edge)


def _passed(
    s_Cm: Tensor, missing_Cm: Tensor, wanted: int, edge: float, tolerance: float, dtype: torch.dtype
) -> Tensor:
    # Early on, a direction above the edge may still look like one below it.
    below = (s_Cm <= edge) & (missing_Cm <= _SETTLED * s_Cm)
    fine = resolved(s_Cm, missing_Cm, edge, tolerance) | below
    if dtype == torch.float64:
        # Equal singular values have no directions of their own: working precision is all there is.
        fine |= missing_Cm <= 1e-12 * s_Cm[:, :1]
    return fine[:, :wanted].all(1)


def _projected(B_Cmm: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return left, values and right of the ``count`` strongest directions of the projected matrices."""
    if dtype == torch.float64:
        y, s, zt = torch.linalg.svd(B_Cmm)
        return y[..., :count], s[:, :count], zt.mT[..., :count]
    # Squaring in float64 loses nothing of what float32 products have left, and costs a third.
    y_Cmk = torch.linalg.eigh(torch.matmul(B_Cmm, B_Cmm.mT))[1].flip(-1)[..., :count]
    z_Cmk = torch.matmul(B_Cmm.mT, y_Cmk)
    s_Ck = torch.linalg.vector_norm(z_Cmk, dim=1)
    return y_Cmk, s_Ck, z_Cmk / s_Ck.clamp(min=torch.finfo(torch.float64).tiny)[:, None]


class _Basis:
    """Orthonormal columns of every matrix of a batch, in one piece of memory."""

    def __init__(self, like: Tensor, rows: int, limit: int) -> None:
        # Grows by doubling: most searches end long before the limit.
        self._store = like.new_empty(like.shape[0], min(limit, 128), rows)
        self._limit = limit
        self.size = 0

    @property
    def columns(self) -> Tensor:
        """``[C, rows, m]``."""
        return self._store[:, : self.size].mT

    def add(self, block_Crb: Tensor) -> None:
        """Append columns that are orthonormal to the present ones."""
        end = self.size + block_Crb.shape[2]
        if end > self._store.shape[1]:
            grown = self._store.new_empty(
                self._store.shape[0], min(self._limit, 2 * end), self._store.shape[2]
            )
            grown[:, : self.size] = self._store[:, : self.size]
            self._store = grown
        self._store[:, self.size : end] = block_Crb.mT
        self.size = end

    def extend(self, Y_Crb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split Y into its part in the basis and a new orthonormal block: ``Y = Q along + N R``.

        The projection is removed twice: once is not enough in finite precision (Kahan; Parlett, 1980).
        """
        rows_Cmr = self._store[:, : self.size]
        along = torch.matmul(rows_Cmr, Y_Crb)
        left_Cbr = torch.baddbmm(Y_Crb.mT, along.mT, rows_Cmr, alpha=-1)
        again = torch.matmul(rows_Cmr, left_Cbr.mT)
        left_Cbr = torch.baddbmm(left_Cbr, again.mT, rows_Cmr, alpha=-1)
        new, R = torch.linalg.qr(left_Cbr.mT)
        pivots = R.diagonal(dim1=1, dim2=2).abs()
        least = 1e3 * torch.finfo(R.dtype).eps * torch.linalg.vector_norm(Y_Crb, dim=1).amax(1)
        if self.size and bool((pivots < least[:, None]).any()):
            # Some of Y lay in the basis: what is left of it is rounding, and may point anywhere.
            for _ in range(2):
                new = new - torch.matmul(rows_Cmr.mT, torch.matmul(rows_Cmr, new))
                new, turn = torch.linalg.qr(new)
                R = torch.matmul(turn, R)
        return along + again, new, R
