"""The simple noise scale of a gradient, with an interval over its samples or replicates. No torch.

R gradients G_a of ``samples`` samples each, the noise of which is independent: single samples, microbatches
or ranks. Their squared norms and their inner products with their sum are enough, and both add up over
parameters. docs/formulas.md, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backlight.student_t import student_quantile

CONFIDENCE = 0.95
"""Coverage of an interval."""

LEAST = 3
"""Fewest gradients with an interval."""


class Interval(NamedTuple):
    """Bounds; NaN where there is no interval."""

    low: float
    high: float


@dataclass(frozen=True)
class NoiseScale:
    """Simple noise scale ``tr Σ / |G|²`` in samples, and its interval; infinite where no signal was found.

    ``share`` is rho, the share of signal in the squared norm of one of the ``gradients``.
    """

    value: float
    interval: Interval
    share: float
    share_interval: Interval
    gradients: int


def noise_scale(squares: ArrayLike, products: ArrayLike, samples: float) -> NoiseScale:
    """Return the noise scale of R gradients of ``samples`` samples each.

    Parameters
    ----------
    squares
        Squared norm of each gradient, ``[R]``, R >= 2.
    products
        Inner product of each gradient with the sum of all, ``[R]``.
    samples
        Samples of one gradient.

    Returns
    -------
    NoiseScale
        ``B (1 - rho) / rho`` with ``rho = S / T``, S the mean inner product of two different gradients (a
        U-statistic, unbiased for ``|G|²``) and T the mean squared norm. The interval is that of rho, a
        jackknife over the R gradients with Student's quantile of R - 1 degrees of freedom, mapped to the
        noise scale: its upper end is infinite where that of rho includes 0.

    Raises
    ------
    ValueError
        If there are fewer than two gradients, shapes differ, or ``samples`` is not positive.
    """
    square_R, product_R = (np.asarray(moments, dtype=np.float64) for moments in (squares, products))
    if square_R.ndim != 1 or square_R.shape != product_R.shape or len(square_R) < 2:
        raise ValueError(
            f"noise scale: expected squares and products [R] of R >= 2 gradients, got shapes "
            f"{square_R.shape} and {product_R.shape}"
        )
    if not samples > 0:
        raise ValueError(f"noise scale: the samples of a gradient must be positive, got {samples!r}")
    R = len(square_R)
    square, product = square_R.sum(), product_R.sum()
    share = _share(product - square, square, R)
    bounds = Interval(math.nan, math.nan)
    if R >= LEAST:
        # Without a: its row and its column are taken out of the sum over all pairs.
        pairs = product - 2 * product_R + square_R - (square - square_R)
        left_out = np.array([_share(*parts, R - 1) for parts in zip(pairs, square - square_R, strict=True)])
        bounds = _jackknife(share, left_out)
    return NoiseScale(
        value=_scale(share, samples),
        interval=Interval(_scale(bounds.high, samples), _scale(bounds.low, samples)),
        share=share,
        share_interval=bounds,
        gradients=R,
    )


def _share(pairs: float, square: float, R: int) -> float:
    return float(pairs / ((R - 1) * square)) if square > 0 else math.nan


def _scale(share: float, samples: float) -> float:
    if math.isnan(share):
        return math.nan
    return max(0.0, samples * (1 - share) / share) if share > 0 else math.inf


def _jackknife(value: float, left_out_R: NDArray[np.float64]) -> Interval:
    R = len(left_out_R)
    variance = (R - 1) / R * float(np.square(left_out_R - left_out_R.mean()).sum())
    away = math.sqrt(variance) * student_quantile(R - 1, (1 + CONFIDENCE) / 2)
    return Interval(value - away, value + away)
