"""How much of a singular direction comes back with other data: the spectral echo.

R replicates, K directions, p x q. With the true direction ``u_i, v_i`` and that of a replicate
``û_i, v̂_i`` the echo is ``ζ_i = <u_i, û_i><v_i, v̂_i>``. The truth is not known, but two replicates with
independent noise have ``Z_ab = <û_a, û_b><v̂_a, v̂_b>``, expected ``ζ_a ζ_b``: their reverb. Signs of
singular vectors cancel in it. Every function takes reverbs with any diagonal and leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Float64 = NDArray[np.float64]
Estimator = Literal["triple", "pooled"]


def reverb(U_RpK: Tensor, V_RqK: Tensor) -> Float64:
    """Return ``Z_ab = <û_a, û_b><v̂_a, v̂_b>`` of every direction, float64 ``[K, R, R]``, diagonal zero.

    Parameters
    ----------
    U_RpK, V_RqK
        Unit left and right singular vectors, aligned: direction i is the same one in every replicate.
    """
    return _without_diagonal(_gram(U_RpK.permute(2, 0, 1)) * _gram(V_RqK.permute(2, 0, 1)))


def block_reverb(U_RpK: Tensor, V_RqK: Tensor, blocks: Sequence[tuple[int, int]]) -> Float64:
    """Return the reverb of whole blocks of directions, float64 ``[B, R, R]``, diagonal zero.

    ``<U_a V_a^T, U_b V_b^T>_F / m`` for a block of m directions: the reverb of the orthogonalised block,
    which does not change when its directions are rotated among themselves, as noise does where singular
    values are close. For m = 1 it is :func:`reverb`.

    Parameters
    ----------
    U_RpK, V_RqK
        As for :func:`reverb`.
    blocks
        Half-open ranges of directions, as of :func:`backlight.measure.spectra.shrinkage.clusters`.
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
    """Estimate the echo of every replicate by corrected triple least squares.

    ``ζ_a^2 = [(Z Z) o Z 1]_a / (|Z|_F^2 - 2 sum_b Z_ab^2)``: the least-squares solution of
    ``Z_ab Z_ac = ζ_a^2 Z_bc`` over all pairs of other replicates. The denominator leaves out the pairs
    that contain the replicate itself; with them the estimate is low by ``sqrt((R - 2) / R)``.

    Parameters
    ----------
    Z
        Reverbs ``[..., R, R]`` with R >= 3.
    weights
        Non-negative weights of the replicates ``[..., R]``; all 1 by default.

    Returns
    -------
    NDArray
        ``[..., R]``, the root with the sign of the square: pure noise scatters around 0. NaN where the
        other replicates have no reverb at all.

    Raises
    ------
    ValueError
        If there are fewer than three replicates.
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
    """Estimate one echo for all replicates, ``sqrt(mean of Z_ab over a != b)``, with the sign of the mean.

    Parameters
    ----------
    Z
        Reverbs ``[..., R, R]`` with R >= 2.
    weights
        Non-negative weights of the replicates ``[..., R]``; all 1 by default.

    Raises
    ------
    ValueError
        If there are fewer than two replicates.
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


ESTIMATORS: dict[str, Callable[..., Float64]] = {"triple": triple_mean, "pooled": pooled}
"""From reverbs ``[..., R, R]`` and weights ``[..., R]`` to one echo ``[...]``."""


def residual(Z: ArrayLike, zeta: ArrayLike) -> Float64:
    """Return how badly ``ζ_a ζ_b`` fits the reverbs: ``|Z - ζ ζ^T| / |Z|`` off the diagonal, ``[...]``.

    0 where the model holds; near 1 and above where it says nothing, as for pure noise or for directions
    that change places between replicates. NaN where all reverbs are zero.

    Parameters
    ----------
    Z
        Reverbs ``[..., R, R]``.
    zeta
        Echo of each replicate ``[..., R]``, as of :func:`triple`.
    """
    Z, z = _checked(Z, least=2), np.nan_to_num(np.asarray(zeta, dtype=np.float64))
    misfit = _without_diagonal(Z - z[..., :, None] * z[..., None, :])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.linalg.norm(misfit, axis=(-2, -1)) / np.linalg.norm(Z, axis=(-2, -1))
    return np.asarray(ratio, dtype=np.float64)


def unbiased_diagonal(U_RpK: Tensor, V_RqK: Tensor, others_Rpq: Tensor) -> Float64:
    """Return ``d = û_a^T M_a v̂_a``, the size of the gradient along each replicate's directions, ``[R, K]``.

    With ``M_a`` the mean of the *other* replicates it is unbiased for ``û^T G v̂`` given the directions,
    for any spectrum and without any alignment; its error has standard deviation ``sigma / sqrt(R - 1)``.

    Parameters
    ----------
    U_RpK, V_RqK
        Unit singular vectors of the replicates.
    others_Rpq
        For each replicate the mean of the others.
    """
    d_RK = (torch.matmul(others_Rpq, V_RqK) * U_RpK).sum(1, dtype=torch.float64)
    return np.asarray(d_RK.cpu().numpy(), dtype=np.float64)


def bootstrap(
    replicates: int,
    estimate: Callable[[Float64], Float64],
    *,
    draws: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> Float64:
    """Return the interval ``[..., 2]`` of an estimate over replicates, by the Bayesian bootstrap.

    Replicates get weights from a Dirichlet law (Rubin, Ann. Statist. 9, 1981) in place of being drawn
    with replacement: a replicate drawn twice would meet itself in a reverb, and three replicates would
    often leave one. Its concentration is ``(R - 2) / R``, at which the variance of a weighted mean is the
    unbiased ``s^2 / R``; with a flat law intervals of few replicates are too narrow. Fewer than three
    replicates have no interval: NaN.

    Parameters
    ----------
    replicates
        R.
    estimate
        From weights ``[draws, R]`` that sum to R to estimates ``[draws, ...]``.
    draws
        Number of weightings.
    confidence
        Share between the two quantiles.
    seed
        Of the random numbers: equal seeds give equal intervals.
    """
    concentration = np.full(replicates, max(replicates - 2, 1) / replicates)
    weights = np.random.default_rng(seed).dirichlet(concentration, draws) * replicates
    found = estimate(weights)
    if replicates < 3:
        return np.full((*found.shape[1:], 2), np.nan)
    # A degenerate weighting has no estimate; with none at all the interval is NaN, without a warning.
    usable = ~np.all(np.isnan(found), axis=0)
    interval = np.full((*found.shape[1:], 2), np.nan)
    tail = (1 - confidence) / 2
    if usable.any():
        interval[usable] = np.moveaxis(np.nanquantile(found[:, usable], [tail, 1 - tail], axis=0), 0, -1)
    return interval


def interval_of_echo(
    Z: ArrayLike,
    *,
    estimator: Estimator = "triple",
    draws: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> Float64:
    """Return the interval ``[K, 2]`` of the echo of reverbs ``[K, R, R]``; see :func:`bootstrap`."""
    Z = _checked(Z, least=3 if estimator == "triple" else 2)

    def estimate(weights: Float64) -> Float64:
        by_direction = [ESTIMATORS[estimator](one, weights) for one in Z]
        return np.stack(by_direction, axis=-1) if by_direction else np.empty((len(weights), 0))

    return bootstrap(Z.shape[-1], estimate, draws=draws, confidence=confidence, seed=seed)


def signed_root(square: ArrayLike) -> Float64:
    """Return ``sign(x) sqrt(|x|)``: the root of an estimate that may lie below 0 by chance."""
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
