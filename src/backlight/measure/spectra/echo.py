"""The spectral echo: how much of a singular direction is found again with other data.

R replicates, K directions, p x q. With the true direction ``u_i, v_i`` and that of a replicate ``û_i, v̂_i``
the echo is ``ζ_i = <u_i, û_i><v_i, v̂_i>``. The truth is unknown, but two replicates with independent noise
have the reverb ``Z_ab = <û_a, û_b><v̂_a, v̂_b>``, expected ``ζ_a ζ_b``; signs of singular vectors cancel in
it. Every function accepts reverbs with any diagonal and ignores it. An alignment assigns J >= K candidates
of a replicate to the K directions of a reference, each candidate at most once. docs/formulas.md, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from backlight.extras import require
from backlight.student_t import student_quantile

Float64 = NDArray[np.float64]

CONFIDENCE = 0.95
"""Share of repeated measurements whose interval contains the true value."""


def reverb(U_RpK: Tensor, V_RqK: Tensor) -> Float64:
    """Return ``Z_ab = <û_a, û_b><v̂_a, v̂_b>`` of every direction, float64 ``[K, R, R]``, diagonal zero.

    ``U_RpK`` and ``V_RqK`` are aligned unit singular vectors: direction i is the same one in every replicate.
    """
    return _without_diagonal(_gram(U_RpK.permute(2, 0, 1)) * _gram(V_RqK.permute(2, 0, 1)))


def block_reverb(U_RpK: Tensor, V_RqK: Tensor, blocks: Sequence[tuple[int, int]]) -> Float64:
    """Return the reverb of whole blocks of directions, float64 ``[B, R, R]``, diagonal zero.

    ``<U_a V_a^T, U_b V_b^T>_F / m`` for a block of m directions, which does not change when they are rotated
    among themselves, as noise does where singular values are close. ``blocks`` are half-open ranges, see
    :func:`backlight.measure.spectra.shrinkage.clusters`.
    """
    count = U_RpK.shape[0]
    Z = np.zeros((len(blocks), count, count))
    for index, (begin, end) in enumerate(blocks):
        U_Rpm, V_Rqm = U_RpK[..., begin:end], V_RqK[..., begin:end]
        for a in range(count):
            left_Rmm = torch.matmul(U_Rpm[a].T, U_Rpm[a + 1 :])
            right_Rmm = torch.matmul(V_Rqm[a].T, V_Rqm[a + 1 :])
            both = (left_Rmm.double() * right_Rmm.double()).sum((1, 2)) / (end - begin)
            Z[index, a, a + 1 :] = both.cpu().numpy()
    return Z + np.swapaxes(Z, 1, 2)


def triple(Z: ArrayLike) -> Float64:
    """Estimate the echo of every replicate ``[..., R]`` by corrected triple least squares; needs R >= 3.

    ``ζ_a^2 = [(Z Z) o Z 1]_a / (|Z|_F^2 - 2 sum_b Z_ab^2)``: the least-squares solution of ``Z_ab Z_ac =
    ζ_a^2 Z_bc`` over all pairs of other replicates. The denominator leaves out the pairs that contain the
    replicate itself; with them the estimate is low by ``sqrt((R - 2) / R)``. ``Z`` is ``[..., R, R]``. The
    root has the sign of the square, so pure noise scatters around 0; NaN where the other replicates have no
    reverb at all.
    """
    Z = _checked(Z, least=3)
    # A common factor leaves the ratio's unit alone and keeps squares in range.
    unit = np.max(np.abs(Z), axis=(-2, -1), keepdims=True)
    Z = Z / np.where(unit > 0, unit, 1.0)
    above = np.sum((Z @ Z) * Z, axis=-1)
    squares = np.sum(Z * Z, axis=-1)
    total = np.sum(squares, axis=-1)
    below = total[..., None] - 2 * squares
    with np.errstate(divide="ignore", invalid="ignore"):
        square = np.where(below > 1e-12 * total[..., None], above / below, np.nan)
    return signed_root(square * unit[..., 0])


def pooled(Z: ArrayLike) -> Float64:
    """Estimate one echo for all replicates, ``sqrt(mean of Z_ab over a != b)`` with the sign of the mean.

    Needs R >= 2. ``Z`` is ``[..., R, R]``.
    """
    Z = _checked(Z, least=2)
    return signed_root(Z.sum((-2, -1)) / (Z.shape[-1] * (Z.shape[-1] - 1)))


def triple_mean(Z: ArrayLike) -> Float64:
    """Return the mean over the replicates of :func:`triple`, ``[...]``; NaN where none has an estimate."""
    zeta = triple(Z)
    has_estimate = ~np.isnan(zeta)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(zeta).sum(-1) / has_estimate.sum(-1))


def residual(Z: ArrayLike, zeta: ArrayLike) -> Float64:
    """Return how badly ``ζ_a ζ_b`` fits the reverbs: ``|Z - ζ ζ^T| / |Z|`` off the diagonal, ``[...]``.

    0 where the model holds; near 1 and above where it does not, as for pure noise or for directions that are
    exchanged between replicates. NaN where all reverbs are zero. ``zeta`` is the echo of each replicate
    ``[..., R]``.
    """
    Z, z = _checked(Z, least=2), np.nan_to_num(np.asarray(zeta, dtype=np.float64))
    misfit = _without_diagonal(Z - z[..., :, None] * z[..., None, :])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.linalg.norm(misfit, axis=(-2, -1)) / np.linalg.norm(Z, axis=(-2, -1))
    return np.asarray(ratio, dtype=np.float64)


def cross_diagonal(U_RpK: Tensor, V_RqK: Tensor, G_Cpq: Tensor) -> Float64:
    """Return ``D_ab = û_a^T G_b v̂_a``, the size of replicate b along the directions of a, ``[K, R, C]``.

    Given the directions, D_ab with b != a is unbiased for ``û_a^T G v̂_a``, for any spectrum and without
    alignment; the mean over the other replicates has standard error ``sigma / sqrt(R - 1)``.
    """
    D = np.empty((U_RpK.shape[2], len(U_RpK), len(G_Cpq)))
    for b, G_pq in enumerate(G_Cpq):
        for a, (left_pK, right_qK) in enumerate(zip(U_RpK, V_RqK, strict=True)):
            D[:, a, b] = (torch.matmul(G_pq, right_qK) * left_pK).sum(0, dtype=torch.float64).cpu().numpy()
    return D


def pair_interval(X: ArrayLike) -> Float64:
    """Return the interval ``[..., 2]`` of the mean of ``X_ab`` over a != b, of ``[..., R, R]``.

    Pairs share replicates: X_ab and X_cb have the noise of b in common. The mean is a U-statistic, and its
    variance is that of the jackknife over replicates (Arvesen, Ann. Math. Statist. 40, 1969), with Student's
    quantile of R - 1 degrees of freedom. Fewer than three replicates have no interval: NaN.
    """
    X = _without_diagonal(np.asarray(X, dtype=np.float64))
    R = X.shape[-1]
    if R < 3:
        return np.full((*X.shape[:-2], 2), np.nan)
    total, row_sums = X.sum((-2, -1)), X.sum(-1) + X.sum(-2)
    return _around(total / (R * (R - 1)), (total[..., None] - row_sums) / ((R - 1) * (R - 2)))


def interval_of_pooled(Z: ArrayLike) -> Float64:
    """Return the interval ``[..., 2]`` of :func:`pooled` of reverbs ``[..., R, R]``; NaN for R < 3."""
    return np.clip(signed_root(pair_interval(Z)), -1.0, 1.0)


def interval_of_echo(Z: Float64) -> Float64:
    """Return the interval ``[..., 2]`` of :func:`triple_mean` of reverbs ``[..., R, R]``; NaN for R < 3.

    The jackknife over replicates. Of three, none can be left out: theirs is that of the pooled estimate.
    """
    R = Z.shape[-1]
    if R < 4:
        return interval_of_pooled(Z)
    rest = [np.delete(np.arange(R), a) for a in range(R)]
    left_out = np.stack([triple_mean(Z[..., kept[:, None], kept]) for kept in rest], axis=-1)
    return np.clip(_around(triple_mean(Z), left_out), -1.0, 1.0)


def _around(estimate: Float64, left_out: Float64) -> Float64:
    """Return the interval around an estimate, from those without each of R replicates ``[..., R]``."""
    R = left_out.shape[-1]
    away = left_out - left_out.mean(-1, keepdims=True)
    error = np.sqrt((R - 1) / R * (away**2).sum(-1)) * student_quantile(R - 1, (1 + CONFIDENCE) / 2)
    return np.stack([estimate - error, estimate + error], axis=-1)


def signed_root(square: ArrayLike) -> Float64:
    """Return ``sign(x) sqrt(|x|)``, the root of an estimate that may be negative by chance."""
    x = np.asarray(square, dtype=np.float64)
    return np.asarray(np.sign(x) * np.sqrt(np.abs(x)))


def _gram(x_KRn: Tensor) -> Float64:
    """Return inner products ``[K, R, R]``, a few directions at a time: their layout costs a copy."""
    step = max(1, 2**24 // max(1, x_KRn.shape[1] * x_KRn.shape[2]))
    parts = []
    for begin in range(0, x_KRn.shape[0], step):
        rows = x_KRn[begin : begin + step].contiguous()
        parts.append(torch.matmul(rows, rows.mT).cpu().numpy().astype(np.float64))
    return np.concatenate(parts) if parts else np.empty((0, x_KRn.shape[1], x_KRn.shape[1]))


def _without_diagonal(Z: Float64) -> Float64:
    Z = Z.copy()
    index = np.arange(Z.shape[-1])
    Z[..., index, index] = 0.0
    return Z


def _checked(Z: ArrayLike, *, least: int) -> Float64:
    Z = np.asarray(Z, dtype=np.float64)
    if Z.ndim < 2 or Z.shape[-1] != Z.shape[-2]:
        raise ValueError(f"expected reverbs [..., R, R], got shape {Z.shape}")
    if Z.shape[-1] < least:
        raise ValueError(f"{Z.shape[-1]} replicate(s), at least {least} are needed for this estimate")
    return _without_diagonal(Z)


@dataclass(frozen=True)
class Alignment:
    """Candidates assigned to the directions of a reference; every array is ``[K]``."""

    permutation: NDArray[np.int64]  # candidate that is direction i; no candidate twice
    score: Float64  # product of the overlaps on both sides, in [0, 1]
    ambiguity: Float64  # score minus that of the best other candidate: near 0 where the choice is uncertain


def overlaps(left_pJ: Tensor, right_qJ: Tensor, ref_left_pK: Tensor, ref_right_qK: Tensor) -> Float64:
    """Return ``|U^T U_ref|`` and ``|V^T V_ref|``, ``[2, J, K]``; their product is the score of a match."""
    sides = ((left_pJ, ref_left_pK), (right_qJ, ref_right_qK))
    sides_of = [torch.matmul(side.T, reference).abs().cpu().numpy() for side, reference in sides]
    return np.asarray(sides_of, dtype=np.float64)


Matching = Literal["auto", "hungarian", "greedy"]

GREEDY_ABOVE = 1024
"""Directions above which ``auto`` assigns greedily: the Hungarian method costs their number cubed."""


def align(score_JK: ArrayLike, matching: Matching = "auto") -> Alignment:
    """Assign one of J candidates to each of K directions, J >= K, by their scores ``[J, K]``.

    ``hungarian`` has the largest sum of scores (scipy); ``greedy`` takes the largest score that is left,
    again and again, and has at least half of that sum (Avis, 1983); ``auto`` is the first up to 1024
    directions. Both are deterministic.

    Raises
    ------
    ValueError
        If there are fewer candidates than directions, a score is not finite, or ``matching`` is unknown.
    """
    score = np.asarray(score_JK, dtype=np.float64)
    if matching not in get_args(Matching):
        raise ValueError(f"matching must be one of {', '.join(get_args(Matching))}, got {matching!r}")
    if score.ndim != 2 or score.shape[0] < score.shape[1]:
        raise ValueError(f"expected scores [J, K] with at least K candidates, got shape {score.shape}")
    if not np.isfinite(score).all():
        raise ValueError("scores must be finite: a singular vector holds NaN or infinite values")
    if matching == "greedy" or (matching == "auto" and score.shape[1] > GREEDY_ABOVE):
        chosen = _greedy(score)
    else:
        require("scipy", what="matching of singular directions")
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - an optional package

        chosen = linear_sum_assignment(score.T, maximize=True)[1].astype(np.int64)
    columns = np.arange(score.shape[1])
    taken = score[chosen, columns]
    others = score.copy()
    others[chosen, columns] = -np.inf
    second = np.max(others, axis=0, initial=-np.inf)
    return Alignment(chosen, taken, taken - np.where(np.isfinite(second), second, 0.0))


def _greedy(score_JK: Float64) -> NDArray[np.int64]:
    """Return the candidate of each direction ``[K]``: the largest score that is left goes first.

    Pairs that are each other's best among what is left are those that it would take, in any order.
    """
    left = score_JK.copy()
    J, K = left.shape
    chosen = np.full(K, -1, dtype=np.int64)
    rows, columns = np.arange(J), np.arange(K)
    while len(columns):
        part = left[np.ix_(rows, columns)]
        best_row, best_column = part.argmax(0), part.argmax(1)
        mutual = best_column[best_row] == np.arange(len(columns))
        chosen[columns[mutual]] = rows[best_row[mutual]]
        rows, columns = np.delete(rows, best_row[mutual]), columns[~mutual]
    return chosen


MAX_NULL_DIRECTIONS = 256
"""Most directions and candidates of the null: the best of more is hardly better."""


@dataclass(frozen=True)
class Null:
    """The echo that chance alone shows: shuffled controls of every replicate, aligned as the replicate is.

    Coordinates are shuffled and signs flipped, on both sides, independently of the other replicates. Spectrum
    and norms stay, what the replicates share is gone, and the alignment picks its best matches as for the
    true directions, so the bias of picking is in the null as well.
    """

    draws: int
    seed: int

    def permutations(
        self, position: int, left_pJ: Tensor, right_qJ: Tensor, ref_left_pK: Tensor, ref_right_qK: Tensor
    ) -> NDArray[np.int64]:
        """Align the controls of the replicate at ``position``, ``[draws, min(K, MAX_NULL_DIRECTIONS)]``."""
        J, K = min(left_pJ.shape[1], MAX_NULL_DIRECTIONS), min(ref_left_pK.shape[1], MAX_NULL_DIRECTIONS)
        permutations = np.zeros((self.draws, K), dtype=np.int64)
        for draw in range(self.draws):
            left, right = self._shuffled(draw, position, left_pJ[:, :J], right_qJ[:, :J])
            score = overlaps(left, right, ref_left_pK[:, :K], ref_right_qK[:, :K]).prod(0)
            permutations[draw] = align(score).permutation
        return permutations

    def echoes(self, left_RpJ: Tensor, right_RqJ: Tensor, permutations: NDArray[np.int64]) -> Float64:
        """Return the echo of each draw ``[draws, K]``; ``permutations`` is ``[R, draws, K]``."""
        echoes = np.zeros((self.draws, permutations.shape[2]))
        for draw in range(self.draws):
            pairs = []
            for position, (left_pJ, right_qJ) in enumerate(zip(left_RpJ, right_RqJ, strict=True)):
                chosen = torch.from_numpy(permutations[position, draw]).to(left_pJ.device)
                pairs.append(self._shuffled(draw, position, left_pJ[:, chosen], right_qJ[:, chosen]))
            lefts, rights = zip(*pairs, strict=True)
            echoes[draw] = triple_mean(reverb(torch.stack(lefts), torch.stack(rights)))
        return echoes

    def _shuffled(self, draw: int, position: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng((self.seed, draw, position))
        both = []
        for columns in (left, right):
            rows = columns.shape[0]
            order = torch.from_numpy(generator.permutation(rows)).to(columns.device)
            sign = torch.from_numpy(generator.integers(0, 2, rows) * 2.0 - 1.0).to(columns)
            both.append(columns[order] * sign[:, None])
        return both[0], both[1]
