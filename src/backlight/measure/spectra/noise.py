"""How much of a gradient is signal and how much is noise, from its replicates.

R replicates of a p x q gradient, ``G_a = G + E_a``: data-parallel workers times accumulation steps, taken
before any reduction, with batches of one size and disjoint data. Sums are taken in float64.
docs/formulas.md, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.measure.spectra.replicates import BUDGET_BYTES, Replicates, sum_squares
from backlight.measure.spectra.shrinkage import bulk_edge, threshold

# Below this share of noise the difference of two sums of squares has lost too many digits.
_CANCELS = 1e-5


@dataclass(frozen=True)
class Noise:
    """Signal and noise of one gradient."""

    replicates: int  # R
    shape: tuple[int, int]  # p, q
    variance: float  # of one entry: sum_a |G_a - mean|^2 / ((R - 1) p q)
    mean_square: float  # T, mean over the replicates of their sum of squares
    square_of_mean: float  # sum of squares of their mean
    signal_share: float  # rho = (R |mean|^2 - T) / ((R - 1) T); may be below 0 without signal

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of one entry, in the unit of the gradient."""
        return math.sqrt(self.variance)

    @property
    def edge(self) -> float:
        """Bulk edge ``sigma (sqrt p + sqrt q)``: the largest singular value of the noise."""
        return bulk_edge(self.sigma, *self.shape)

    @property
    def threshold(self) -> float:
        """Strength ``s_c = sigma (p q)^(1/4)`` below which no direction can be found in one replicate."""
        return threshold(self.sigma, *self.shape)

    def noise_scale(self, batch: float) -> float:
        """Return the simple noise scale ``B (1 - rho) / rho``, in the unit of ``batch``, that of a replicate.

        The batch at which noise and signal have the same squared norm, which is the critical batch size
        under the assumptions of McCandlish et al., arXiv:1812.06162, section 2.2. Infinite where no signal
        was found (rho not above 0).

        Raises
        ------
        ValueError
            If ``batch`` is not positive.
        """
        if not batch > 0:
            raise ValueError(f"the batch size of a replicate must be positive, got {batch!r}")
        if self.signal_share <= 0:
            return math.inf
        return max(0.0, batch * (1 - self.signal_share) / self.signal_share)

    def share_at(self, replicates: int) -> float:
        """Return the signal share of the mean of so many replicates, ``1 / (1 + (1/rho - 1)/n)``."""
        rho = self.signal_share
        return rho * replicates / (1 + rho * (replicates - 1)) if rho > 0 else 0.0


def noise(
    G: Tensor | Sequence[Tensor],
    *,
    layer: str = "",
    device: torch.device | str | None = None,
    budget: int = BUDGET_BYTES,
) -> Noise:
    """Measure signal and noise of R >= 2 replicates; parameters as for :class:`Replicates`."""
    replicates = Replicates.of(G, layer=layer, device=device, budget=budget)
    return noise_about(replicates, replicates.mean())


def noise_about(replicates: Replicates, mean: Tensor) -> Noise:
    """Measure signal and noise of replicates whose mean ``[p, q]`` is known."""
    count, (p, q) = len(replicates), replicates.shape
    square_of_mean = sum_squares(mean)
    total = math.fsum(replicates.squares)
    mean_square = total / count
    deviation = total - count * square_of_mean
    if deviation < _CANCELS * total:
        deviation = math.fsum(sum_squares(replicates.one(a).to(mean.dtype) - mean) for a in replicates.order)
    variance = deviation / ((count - 1) * p * q)
    # R |mean|^2 - T = (R - 1) T - sum |G_a - mean|^2: exact where all replicates agree.
    share = 1 - deviation / ((count - 1) * mean_square)
    return Noise(count, (p, q), variance, mean_square, square_of_mean, share)


def critical_batch(noises: Sequence[Noise], batch: float) -> float:
    """Return the noise scale of several layers taken together, in the unit of ``batch``.

    Sums of squares of layers add, so this is the noise scale of the gradient that they form, not a mean of
    theirs.

    Raises
    ------
    ValueError
        If there is no layer, or the numbers of replicates differ.
    """
    if not noises or len({n.replicates for n in noises}) > 1:
        raise ValueError("expected layers with the same number of replicates")
    count = noises[0].replicates
    squares = math.fsum(n.mean_square for n in noises)
    noisy = math.fsum(n.variance * n.shape[0] * n.shape[1] for n in noises)
    whole = Noise(count, (1, 1), noisy, squares, math.nan, 1 - noisy / squares)
    return whole.noise_scale(batch)
