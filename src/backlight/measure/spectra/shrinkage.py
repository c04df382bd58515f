"""The spiked matrix model: what noise does to singular values and directions, and two shrinkers.

Arithmetic on a few numbers, in float64. ``G = sum_i s_i u_i v_i^T + E`` with independent entries of ``E`` of
variance ``sigma^2`` and shape p x q: Benaych-Georges and Nadakuditi, J. Multivariate Anal. 111 (2012),
arXiv:1103.2221. Exact for large matrices; at finite size quantities near the threshold move by a relative
amount of order D^(-2/3). docs/formulas.md, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]

MUON = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients a, b, c of Muon's Newton-Schulz iteration: Keller Jordan, "Muon: an optimizer for
hidden layers in neural networks" (2024), and the defaults of ``torch.optim.Muon``."""

MUON_STEPS = 5
"""Iterations that Muon makes by default (same source)."""

# 99 % quantile of the Tracy-Widom law of order 1 (Tracy and Widom, Comm. Math. Phys. 177, 1996).
_TRACY_WIDOM_99 = 2.0234


@dataclass(frozen=True)
class Spike:
    """Expectations of the model for directions of strength ``s``; all arrays have the shape of ``s``."""

    strength: Float64  # singular value without noise; 0 where an observed value is not above the bulk
    value: Float64  # singular value with noise; the bulk edge where the direction is not detectable
    left: Float64  # squared cosine between the noisy and the true left direction (length p)
    right: Float64  # the same for the right direction (length q)
    echo: Float64  # expected spectral echo, sqrt(left * right); 0 below the threshold
    shrunk: Float64  # Frobenius-optimal shrinkage of value, strength * echo (Gavish and Donoho, 1405.7511)


def bulk_edge(sigma: float, p: int, q: int) -> float:
    """Return the largest singular value of pure noise, ``sigma (sqrt p + sqrt q)``, for large matrices."""
    return sigma * (math.sqrt(p) + math.sqrt(q))


def upper_edge(sigma: float, p: int, q: int) -> float:
    """Return what the largest singular value of p x q pure noise exceeds in one case of a hundred.

    The Tracy-Widom law for sample covariances: Johnstone, Ann. Statist. 29 (2001).
    """
    root_p, root_q = math.sqrt(p), math.sqrt(q)
    spread = (root_p + root_q) * (1 / root_p + 1 / root_q) ** (1 / 3)
    return sigma * math.sqrt((root_p + root_q) ** 2 + _TRACY_WIDOM_99 * spread)


_QUADRATURE = 4096
"""Intervals of the distribution function of Marchenko and Pastur, whose ends the substitution smooths."""


def noise_values(sigma: float, p: int, q: int) -> Float64:
    """Return the singular values that p x q pure noise has in the limit of large matrices, ``[min(p, q)]``.

    Value i is ``sigma sqrt(n x)`` with n = max(p, q) and x the quantile ``1 - (i + 1/2) / D`` of the law of
    Marchenko and Pastur (Math. USSR Sbornik 1, 1967) of ratio ``D / n``, with density
    ``sqrt((b - x)(x - a)) / (2 pi (D/n) x)`` between ``a, b = (1 -+ sqrt(D/n))^2``.
    """
    _check(sigma, p, q)
    D, n = min(p, q), max(p, q)
    root = math.sqrt(D / n)
    middle, half = 1 + root**2, 2 * root  # of a and b
    angle = (np.arange(_QUADRATURE) + 0.5) * (math.pi / _QUADRATURE)
    x = middle - half * np.cos(angle)
    mass = (half * np.sin(angle)) ** 2 / x
    share = np.cumsum(mass) / mass.sum()
    wanted = 1 - (np.arange(D) + 0.5) / D
    squares: Float64 = np.interp(wanted, share, x + half * np.sin(angle) * (0.5 * math.pi / _QUADRATURE))
    return sigma * np.sqrt(n * squares)


def noise_stable_rank(p: int, q: int) -> float:
    """Return the stable rank of p x q pure noise, ``p q / (sqrt p + sqrt q)^2``, for large matrices."""
    return p * q / bulk_edge(1.0, p, q) ** 2


def threshold(sigma: float, p: int, q: int) -> float:
    """Return the strength ``s_c = sigma (p q)^(1/4)`` below which no direction can be found."""
    return sigma * math.sqrt(math.sqrt(p * q))


def predict(strength: ArrayLike, sigma: float, p: int, q: int) -> Spike:
    """Return what the model expects of directions of known strength.

    ``strength`` holds singular values of the gradient without noise, any shape; ``sigma`` is the standard
    deviation of the noise of one entry, not negative; p x q the shape of the gradient, not empty.
    """
    _check(sigma, p, q)
    s = np.asarray(strength, dtype=np.float64)
    # In units of the largest strength no square leaves the range of a float64.
    unit = max(float(np.max(np.abs(s), initial=0.0)), sigma) or 1.0
    x, noise = (s / unit) ** 2, (sigma / unit) ** 2
    detectable = x**2 > noise**2 * (p * q)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = x**2 - noise**2 * (p * q)
        value = np.sqrt((x + noise * p) * (x + noise * q) / x) * unit
        left = excess / (x * (x + noise * p))
        right = excess / (x * (x + noise * q))
    left, right = np.where(detectable, left, 0.0), np.where(detectable, right, 0.0)
    echo = np.sqrt(left * right)
    return Spike(s, np.where(detectable, value, bulk_edge(sigma, p, q)), left, right, echo, s * echo)


def infer(value: ArrayLike, sigma: float, p: int, q: int) -> Spike:
    """Return the strength of the directions behind observed singular values, and what follows from it.

    The inverse of :func:`predict`: with ``b = y^2 - sigma^2 (p + q)`` and ``delta = b^2 - 4 p q sigma^4``
    the strength is ``sqrt((b + sqrt(delta)) / 2)`` and the shrunk value ``sqrt(delta) / y``. Values that are
    not above the bulk edge have strength 0.
    """
    _check(sigma, p, q)
    y = np.asarray(value, dtype=np.float64)
    unit = max(float(np.max(np.abs(y), initial=0.0)), sigma) or 1.0
    noise = (sigma / unit) ** 2
    b = (y / unit) ** 2 - noise * (p + q)
    delta = b**2 - 4 * (p * q) * noise**2
    above = (b > 0) & (delta > 0)
    b, delta = np.where(above, b, 0.0), np.where(above, delta, 0.0)
    s = np.sqrt((b + np.sqrt(delta)) / 2) * unit
    spike = predict(s, sigma, p, q)
    return Spike(s, y, spike.left, spike.right, spike.echo, spike.shrunk)


def muon(value: ArrayLike, frobenius: float) -> Float64:
    """Return the singular values of the update that Muon makes of a matrix, before its learning rate.

    ``value`` holds the singular values of the matrix, ``frobenius`` its Frobenius norm, by which Muon
    divides first. Each Newton-Schulz step then maps ``x`` to ``a x + b x^3 + c x^5``: a matrix polynomial
    acts on singular values alone.

    Raises
    ------
    ValueError
        If the norm is not positive: Muon's update of a zero matrix is zero, and has no curve.
    """
    if not frobenius > 0 or not math.isfinite(frobenius):
        raise ValueError(f"the Frobenius norm must be positive and finite, got {frobenius!r}")
    a, b, c = MUON
    x = np.asarray(value, dtype=np.float64) / frobenius
    for _ in range(MUON_STEPS):
        x = x * (a + x**2 * (b + c * x**2))
    return x


def mixing(strength: ArrayLike, sigma: float) -> Float64:
    """Return the angle, in radians, by which noise rotates neighbouring directions into one another.

    For strengths ``s_i > s_j`` first-order perturbation gives an angle with variance ``sigma^2 (s_i^2 +
    s_j^2) / (s_i^2 - s_j^2)^2`` (on both sides). Result ``[K - 1]`` for ``[K]`` strengths: its root
    for each pair of neighbours, infinite where they are equal.
    """
    s = np.asarray(strength, dtype=np.float64)
    unit = float(np.max(np.abs(s), initial=0.0)) or 1.0
    x = (s / unit) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        angle = (sigma / unit) * np.sqrt(x[:-1] + x[1:]) / np.abs(x[:-1] - x[1:])
    return np.where(np.isnan(angle), np.inf, angle)


def clusters(strength: ArrayLike, sigma: float, *, angle: float = 0.3) -> tuple[tuple[int, int], ...]:
    """Group directions that noise rotates into one another by more than ``angle`` radians.

    Single directions of a group cannot be distinguished, but their span can be found again: see
    :func:`backlight.measure.spectra.echo.block_reverb`. Returned are half-open ranges ``(begin, end)`` that
    cover all directions in order; a range of length 1 is a separate direction.
    """
    s = np.asarray(strength, dtype=np.float64)
    cuts = [i + 1 for i, rotated in enumerate(mixing(s, sigma)) if rotated <= angle]
    ends = [*cuts, len(s)] if len(s) else []
    return tuple(zip([0, *cuts], ends, strict=False)) if ends else ()


def _check(sigma: float, p: int, q: int) -> None:
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be finite and not negative, got {sigma!r}")
    if p < 1 or q < 1:
        raise ValueError(f"the shape must not be empty, got {p} x {q}")
