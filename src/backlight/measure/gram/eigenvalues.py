"""Eigenvalues of the second moment and the covariance of per-sample gradients, and metrics of them.

``A [N, M]`` stacks N per-sample gradients, K = A A^T is their Gram, U = A^T A / N their uncentred second
moment and C = U - gg^T their covariance, g being the mean. U has the non-zero eigenvalues of K / N, and C
those of H K H / N with H = I - 11^T / N. For a matrix gradient G ``[p, q]``, G G^T and G^T G have the
squared singular values of G as eigenvalues. docs/formulas.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.extras import require

EXPLAINED = (1, 10)
"""Numbers of leading eigenvalues whose share of the trace is reported by default."""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a second moment, largest first."""

    eigenvalues: NDArray[np.float64]  # float64; all N, or the ``top`` largest; negative ones are set to 0
    samples: int  # N
    centred: bool  # of the covariance instead of the second moment
    trace: float  # of the whole matrix, also with ``top``; nan where unknown
    frobenius: float  # of the whole matrix
    tolerance: float  # eigenvalues above it count for the numerical rank
    mean_square: float = math.nan  # squared norm of the mean gradient, 1^T K 1 / N^2
    uncentred_trace: float = field(default=math.nan, repr=False)

    @property
    def complete(self) -> bool:
        """Whether all eigenvalues were computed."""
        return len(self.eigenvalues) == self.samples

    @property
    def spectral(self) -> float:
        """The largest eigenvalue."""
        return float(self.eigenvalues[0])

    @property
    def nuclear(self) -> float:
        """Sum of the magnitudes of all eigenvalues: the trace, as none is negative."""
        return self.trace

    @property
    def numerical_rank(self) -> int:
        """Number of eigenvalues above the tolerance; ValueError if some of them were not computed."""
        count = int((self.eigenvalues > self.tolerance).sum())
        if count == len(self.eigenvalues) and not self.complete:
            raise ValueError(
                f"the numerical rank needs all {self.samples} eigenvalues, got the {count} largest, all "
                "above the tolerance; ask for the spectrum without top"
            )
        return count

    @property
    def condition(self) -> float:
        """Largest eigenvalue over the smallest one above the tolerance; nan for a zero matrix.

        Of eigenvalues: the square of the ratio of the singular values of what the matrix is a product of.
        """
        rank = self.numerical_rank
        return float(self.eigenvalues[0] / self.eigenvalues[rank - 1]) if rank else math.nan

    @property
    def log_pseudo_determinant(self) -> float:
        """Sum of the natural logarithms of the eigenvalues above the tolerance; nan for a zero matrix."""
        rank = self.numerical_rank
        return float(np.log(self.eigenvalues[:rank]).sum()) if rank else math.nan

    @property
    def effective_rank(self) -> float:
        """Exp of the entropy of the eigenvalues over their sum (Roy and Vetterli, 2007); nan for zero."""
        if not self.complete:
            raise ValueError(
                f"the effective rank needs all {self.samples} eigenvalues, got {len(self.eigenvalues)}; "
                "ask for the spectrum without top"
            )
        total = self.eigenvalues.sum()
        if not total > 0:
            return math.nan
        p = self.eigenvalues[self.eigenvalues > 0] / total
        return float(np.exp(-(p * np.log(p)).sum()))

    @property
    def participation_ratio(self) -> float:
        """Squared trace over squared Frobenius norm; nan for a zero matrix."""
        return (self.trace / self.frobenius) ** 2 if self.frobenius > 0 else math.nan

    @property
    def coherence(self) -> float:
        """Squared norm of the mean gradient over the mean squared norm; 1 where all samples agree."""
        return self.mean_square / self.uncentred_trace if self.uncentred_trace > 0 else math.nan

    @property
    def noise_scale(self) -> float:
        """Simple noise scale in samples: N (T - S) / (N S - T), T the trace of U and S = |g|^2.

        Infinite where the mean is no larger than noise alone would make it; nan for N = 1 or a zero matrix.
        """
        total, mean, n = self.uncentred_trace, self.mean_square, self.samples
        if n < 2 or not total > 0:
            return math.nan
        signal = n * mean - total
        return n * max(0.0, total - mean) / signal if signal > 0 else math.inf

    def explained(self, k: int) -> float:
        """Return the share of the k largest of the computed eigenvalues in the trace; nan for zero."""
        if not 1 <= k <= len(self.eigenvalues):
            raise ValueError(f"explained: k must be between 1 and {len(self.eigenvalues)}, got {k}")
        return float(self.eigenvalues[:k].sum() / self.trace) if self.trace > 0 else math.nan

    def metrics(self, explained: Sequence[int] = EXPLAINED, *, of_samples: bool = True) -> dict[str, float]:
        """Return every metric by name, without those that need eigenvalues that were not computed.

        ``explained`` lists the numbers of leading eigenvalues for ``explained_<k>``. Coherence and noise
        scale compare samples of one distribution and are left out unless the rows are such (``of_samples``).
        """
        names = ["trace", "frobenius", "spectral", "nuclear", "participation_ratio"]
        if self.complete or bool((self.eigenvalues <= self.tolerance).any()):
            names += ["numerical_rank", "condition", "log_pseudo_determinant"]
        names += ["effective_rank"] if self.complete else []
        names += ["coherence", "noise_scale"] if of_samples and not self.centred else []
        shares = {f"explained_{k}": self.explained(k) for k in explained if k <= len(self.eigenvalues)}
        return {name: float(getattr(self, name)) for name in names} | shares


def spectrum(
    K: Tensor,
    *,
    centred: bool = False,
    top: int | None = None,
    device: torch.device | str | None = None,
    input_eps: float = 0.0,
) -> Spectrum:
    """Return the eigenvalues of K / N, or with ``centred`` of H K H / N, for a finite float64 Gram K.

    ``top`` limits them to the largest; ``device`` is where they are computed. ``input_eps`` is the machine
    epsilon of the gradients: the tolerance of the numerical rank is ``N max(eps(float64), input_eps^2)``
    times the largest eigenvalue.

    Raises
    ------
    ValueError
        If ``top`` is not positive, or K is not such a matrix.
    """
    work, n, total, mean = _prepared(K, centred)
    if top is not None and top < 1:
        raise ValueError(f"spectrum: top must be at least 1, got {top}")
    if device is not None:
        work = work.to(device)
    values = _largest(work, top)
    largest = float(max(values[0], 0.0))
    return Spectrum(
        eigenvalues=np.maximum(values, 0.0),
        samples=n,
        centred=centred,
        trace=max(0.0, float(work.trace())),
        frobenius=float(torch.linalg.matrix_norm(work)),
        tolerance=largest * n * max(float(np.finfo(np.float64).eps), input_eps**2),
        mean_square=mean,
        uncentred_trace=total,
    )


def eigenpairs(K: Tensor, k: int, *, centred: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k largest eigenvalues of K / N (or of H K H / N) and the weights of their eigenvectors.

    The eigenvector of U to eigenvalue w_j is ``sum_n W[j, n] g_n`` with W = v^T / sqrt(N w_j), and of C the
    same with W H: H v = v wherever the eigenvalue is not 0. Returned are float64 ``[r]`` and ``[r, N]``, r
    <= k: eigenvalues that are not above ``N eps`` times the largest are left out.

    Raises
    ------
    ValueError
        If k is not between 1 and N.
    """
    work, n, _, _ = _prepared(K, centred)
    if not 1 <= k <= n:
        raise ValueError(f"eigenvectors: k must be between 1 and the {n} samples, got {k}")
    values, vectors = torch.linalg.eigh(work)
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    kept = values > values[0].clamp(min=0) * n * torch.finfo(torch.float64).eps
    values, vectors = values[kept], vectors[:, kept]
    return values, (vectors / (values * n).sqrt()).T


def _prepared(K: Tensor, centred: bool) -> tuple[Tensor, int, float, float]:
    if K.dim() != 2 or K.shape[0] != K.shape[1] or K.dtype != torch.float64 or not K.shape[0]:
        raise ValueError(f"a Gram is a square float64 matrix, got {list(K.shape)} of {K.dtype}")
    if not bool(torch.isfinite(K).all()):
        raise ValueError(
            "the Gram holds values that are not finite: a per-sample gradient overflowed or is NaN; "
            "`backlight nan` finds where"
        )
    n = K.shape[0]
    work = (K + K.T) / (2 * n)
    total, mean = float(work.trace()), float(work.sum()) / n
    if centred:
        row = work.mean(0)
        work = work - row - row[:, None] + work.mean()
        work = (work + work.T) / 2
    return work, n, total, mean


def _largest(work: Tensor, top: int | None) -> NDArray[np.float64]:
    n = work.shape[0]
    if top is not None and work.device.type == "cpu" and n >= 192 and top <= n // 4:
        require("scipy", what="the largest eigenvalues of a Gram matrix")
        from scipy.linalg import eigh  # noqa: PLC0415 - an optional package

        values = eigh(work.numpy(), eigvals_only=True, subset_by_index=(n - top, n - 1), check_finite=False)
    else:
        values = torch.linalg.eigvalsh(work).cpu().numpy()
    return np.ascontiguousarray(values[::-1][: top or n], dtype=np.float64)


def product_spectrum(gradient: Tensor, *, top: int | None = None) -> Spectrum:
    """Return the ``min(p, q)`` eigenvalues that G G^T and G^T G share, through the smaller product.

    They are squared singular values, not divided by p or q; coherence and noise scale have no meaning for
    them. ``top`` limits them to the largest.

    Raises
    ------
    ValueError
        If the gradient has fewer than two dimensions.
    """
    if gradient.dim() < 2:
        raise ValueError(
            f"G G^T needs a gradient with at least two dimensions, got {list(gradient.shape)}; that of a "
            "vector has rank one; use its norm"
        )
    G_pq = gradient.detach().flatten(1).double()
    product = G_pq.T @ G_pq if G_pq.shape[0] > G_pq.shape[1] else G_pq @ G_pq.T
    return spectrum(product * product.shape[0], top=top, input_eps=torch.finfo(gradient.dtype).eps)
