"""The spectral echo: how much of a singular direction is found again with other data.

R replicates, K directions, p x q. With the true direction ``u_i, v_i`` and that of a replicate ``û_i, v̂_i``
the echo is ``ζ_i = <u_i, û_i><v_i, v̂_i>``. The truth is unknown, but two replicates with independent noise
have the reverb ``Z_ab = <û_a, û_b><v̂_a, v̂_b>``, expected ``ζ_a ζ_b``; signs of singular vectors cancel in
it. Every function accepts reverbs with any diagonal and ignores it. An alignment assigns J >= K candidates
of a replicate to the K directions of a reference, each candidate at most once. docs/formulas.md, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Float64 = NDArray[np.float64]

CONFIDENCE = 0.95
"""Share of a bootstrap between the two ends of an interval."""


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


def triple(Z: ArrayLike, weights: ArrayLike | None = None) -> Float64:
    """Estimate the echo of every replicate ``[..., R]`` by corrected triple least squares; needs R >= 3.

    ``ζ_a^2 = [(Z Z) o Z 1]_a / (|Z|_F^2 - 2 sum_b Z_ab^2)``: the least-squares solution of ``Z_ab Z_ac =
    ζ_a^2 Z_bc`` over all pairs of other replicates. The denominator leaves out the pairs that contain the
    replicate itself; with them the estimate is low by ``sqrt((R - 2) / R)``. ``Z`` is ``[..., R, R]``,
    ``weights`` non-negative ``[..., R]``, all 1 by default. The root has the sign of the square, so pure
    noise scatters around 0; NaN where the other replicates have no reverb at all.
    """
    Z = _checked(Z, least=3)
    w = np.ones(Z.shape[-1]) if weights is None else np.asarray(weights, dtype=np.float64)
    # A common factor leaves the ratio's unit alone and keeps squares in range.
    unit = np.max(np.abs(Z), axis=(-2, -1), keepdims=True)
    Z = Z / np.where(unit > 0, unit, 1.0)
    weighted = Z * w[..., None, :]
    above = np.sum((weighted @ Z) * weighted, axis=-1)
    squares = weighted * Z
    total = np.sum(squares * w[..., :, None], axis=(-2, -1))
    below = total[..., None] - 2 * w * np.sum(squares, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        square = np.where(below > 1e-12 * total[..., None], above / below, np.nan)
    return signed_root(square * unit[..., 0])


def pooled(Z: ArrayLike, weights: ArrayLike | None = None) -> Float64:
    """Estimate one echo for all replicates, ``sqrt(mean of Z_ab over a != b)`` with the sign of the mean.

    Needs R >= 2. ``Z`` is ``[..., R, R]``, ``weights`` non-negative ``[..., R]``, all 1 by default.
    """
    Z = _checked(Z, least=2)
    w = np.ones(Z.shape[-1]) if weights is None else np.asarray(weights, dtype=np.float64)
    above = np.einsum("...a,...ab,...b->...", w, Z, w)
    return signed_root(above / (np.sum(w, axis=-1) ** 2 - np.sum(w**2, axis=-1)))


def triple_mean(Z: ArrayLike, weights: ArrayLike | None = None) -> Float64:
    """Return the mean over the replicates of :func:`triple`, ``[...]``."""
    zeta = triple(Z, weights)
    w = np.ones(zeta.shape) if weights is None else np.broadcast_to(weights, zeta.shape)
    w = np.where(np.isnan(zeta), 0.0, w)
    total = np.sum(w, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, np.sum(w * np.nan_to_num(zeta), axis=-1) / total, np.nan)


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


def unbiased_diagonal(U_RpK: Tensor, V_RqK: Tensor, others_Rpq: Tensor) -> Float64:
    """Return ``d = û_a^T M_a v̂_a``, the size of the gradient along each replicate's directions, ``[R, K]``.

    ``others_Rpq`` holds for each replicate the mean ``M_a`` of the *other* ones. Then d is unbiased for
    ``û^T G v̂`` given the directions, for any spectrum and without alignment; its standard error is ``sigma
    / sqrt(R - 1)``.
    """
    d_RK = (torch.matmul(others_Rpq, V_RqK) * U_RpK).sum(1, dtype=torch.float64)
    return np.asarray(d_RK.cpu().numpy(), dtype=np.float64)


def bootstrap(
    replicates: int,
    estimate: Callable[[Float64], Float64],
    *,
    draws: int = 200,
    seed: int = 0,
) -> Float64:
    """Return the interval ``[..., 2]`` of an estimate over R replicates, by the Bayesian bootstrap.

    Replicates get weights from a Dirichlet law (Rubin, Ann. Statist. 9, 1981) instead of being drawn with
    replacement: a replicate drawn twice would have a reverb with itself, and three replicates would often
    leave one. Its concentration is ``(R - 2) / R``, at which the variance of a weighted mean is the unbiased
    ``s^2 / R``; with a flat law intervals of few replicates are too narrow. Fewer than three replicates have
    no interval: NaN. ``estimate`` maps weights ``[draws, R]`` that sum to R to estimates ``[draws, ...]``.
    """
    concentration = np.full(replicates, max(replicates - 2, 1) / replicates)
    weights = np.random.default_rng(seed).dirichlet(concentration, draws) * replicates
    found = estimate(weights)
    if replicates < 3:
        return np.full((*found.shape[1:], 2), np.nan)
    # A degenerate weighting has no estimate; with none at all the interval is NaN, without a warning.
    usable = ~np.all(np.isnan(found), axis=0)
    interval = np.full((*found.shape[1:], 2), np.nan)
    tail = (1 - CONFIDENCE) / 2
    if usable.any():
        interval[usable] = np.moveaxis(np.nanquantile(found[:, usable], [tail, 1 - tail], axis=0), 0, -1)
    return interval


def interval_of_echo(
    Z: Float64, estimator: Callable[..., Float64] = triple_mean, *, draws: int = 200, seed: int = 0
) -> Float64:
    """Return the interval ``[K, 2]`` of :func:`triple_mean` or :func:`pooled` of reverbs ``[K, R, R]``."""

    def estimate(weights: Float64) -> Float64:
        by_direction = [estimator(one, weights) for one in Z]
        return np.stack(by_direction, axis=-1) if by_direction else np.empty((len(weights), 0))

    return bootstrap(Z.shape[-1], estimate, draws=draws, seed=seed)


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
    found = [torch.matmul(side.T, reference).abs().cpu().numpy() for side, reference in sides]
    return np.asarray(found, dtype=np.float64)


def align(score_JK: ArrayLike) -> Alignment:
    """Assign one of J candidates to each of K directions, J >= K, by the largest sum of scores ``[J, K]``.

    The Hungarian method of scipy, which is deterministic.

    Raises
    ------
    ValueError
        If there are fewer candidates than directions, or a score is not finite.
    """
    score = np.asarray(score_JK, dtype=np.float64)
    if score.ndim != 2 or score.shape[0] < score.shape[1]:
        raise ValueError(f"expected scores [J, K] with at least K candidates, got shape {score.shape}")
    if not np.isfinite(score).all():
        raise ValueError("scores must be finite: a singular vector holds NaN or infinite values")
    chosen = linear_sum_assignment(score.T, maximize=True)[1].astype(np.int64)
    columns = np.arange(score.shape[1])
    taken = score[chosen, columns]
    others = score.copy()
    others[chosen, columns] = -np.inf
    second = np.max(others, axis=0, initial=-np.inf)
    return Alignment(chosen, taken, taken - np.where(np.isfinite(second), second, 0.0))


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
        found = np.zeros((self.draws, K), dtype=np.int64)
        for draw in range(self.draws):
            left, right = self._shuffled(draw, position, left_pJ[:, :J], right_qJ[:, :J])
            score = overlaps(left, right, ref_left_pK[:, :K], ref_right_qK[:, :K]).prod(0)
            found[draw] = align(score).permutation
        return found

    def echoes(self, left_RpJ: Tensor, right_RqJ: Tensor, permutations: NDArray[np.int64]) -> Float64:
        """Return the echo of each draw ``[draws, K]``; ``permutations`` is ``[R, draws, K]``."""
        found = np.zeros((self.draws, permutations.shape[2]))
        for draw in range(self.draws):
            pairs = []
            for position, (left_pJ, right_qJ) in enumerate(zip(left_RpJ, right_RqJ, strict=True)):
                chosen = torch.from_numpy(permutations[position, draw]).to(left_pJ.device)
                pairs.append(self._shuffled(draw, position, left_pJ[:, chosen], right_qJ[:, chosen]))
            lefts, rights = zip(*pairs, strict=True)
            found[draw] = triple_mean(reverb(torch.stack(lefts), torch.stack(rights)))
        return found

    def _shuffled(self, draw: int, position: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng((self.seed, draw, position))
        both = []
        for columns in (left, right):
            rows = columns.shape[0]
            order = torch.from_numpy(generator.permutation(rows)).to(columns.device)
            sign = torch.from_numpy(generator.integers(0, 2, rows) * 2.0 - 1.0).to(columns)
            both.append(columns[order] * sign[:, None])
        return both[0], both[1]
