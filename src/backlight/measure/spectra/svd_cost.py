"""How many directions of a gradient can be found in one replicate, and the cheapest way to find them.

The noise level comes first. A direction is *identifiable* if the singular value that the spiked model
expects of it in one replicate lies above what the largest singular value of pure noise exceeds in one
case out of a hundred. Its strength is read off the mean of all replicates, where noise is weaker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.spectra.decomposition import OVERSAMPLING, SMALL, Method, count_above, decompose
from backlight.measure.spectra.noise import Noise
from backlight.measure.spectra.randomized_svd import Directions
from backlight.measure.spectra.shrinkage import infer, predict, upper_edge

# With more directions than this share of D the search for a few of them costs as much as all.
_SHARE = 1 / 8


@dataclass(frozen=True)
class Plan:
    """What is computed of each replicate.

    Attributes
    ----------
    method
        Never ``"auto"``.
    identifiable
        k, the number of identifiable directions.
    directions
        K, how many are measured.
    candidates
        J >= K, how many of each replicate are looked at.
    edge
        Singular values of one replicate above it are not those of noise.
    mean_edge
        The same for the mean of all replicates but one.
    mean
        Directions of the mean of all replicates, ``[1, ., >= K]``: they number the directions.
    """

    method: Literal["svd", "gram", "randomized"]
    identifiable: int
    directions: int
    candidates: int
    edge: float
    mean_edge: float
    mean: Directions


def plan(
    mean_pq: Tensor,
    pilot_pq: Tensor,
    noise: Noise,
    *,
    method: Method = "auto",
    max_directions: int | None = None,
    layer: str = "",
) -> Plan:
    """Decide what to compute, p <= q.

    Parameters
    ----------
    mean_pq
        Mean of the replicates.
    pilot_pq
        One replicate: real noise may have more large singular values than the model of it.
    noise
        Noise of one replicate.
    method
        ``"auto"``: everything where the matrix is small, else a search for as many directions as there
        are to be found, unless they are many.
    max_directions
        Most directions to measure.
    layer
        What messages call the layer.

    Raises
    ------
    ValueError
        If ``method`` is unknown or ``max_directions`` is not positive.
    """
    if method not in {"auto", "svd", "gram", "randomized"}:
        raise ValueError(f"method must be 'auto', 'svd', 'gram' or 'randomized', got {method!r}")
    if max_directions is not None and max_directions < 1:
        raise ValueError(f"max_directions must be at least 1, got {max_directions}")
    p, q = mean_pq.shape
    most = p if max_directions is None else min(p, max_directions)
    sigma, count = noise.sigma, noise.replicates
    edge = upper_edge(sigma, p, q)
    mean_edge = upper_edge(sigma / (count - 1) ** 0.5, p, q)
    visible = _visible(noise, p, q)
    if method == "svd" or (method == "auto" and p <= SMALL):
        whole = decompose(mean_pq[None], method="svd", layer=layer, names=("of the mean",))
        identifiable = int((whole.values[0] >= visible).sum())
        return Plan("svd", identifiable, most, most, edge, mean_edge, whole)
    limit = p if method != "auto" else max(1, int(p * _SHARE))
    found: Directions | None = None
    identifiable = candidates = p
    if method != "gram":
        identifiable, found = count_above(mean_pq, visible, limit=limit)
        above = count_above(pilot_pq, edge, limit=limit)[0] if identifiable else 0
        candidates = max(identifiable, above) + OVERSAMPLING
    if found is None or (method == "auto" and candidates > limit):
        found = decompose(mean_pq[None], method="gram", layer=layer, names=("of the mean",))
        identifiable = int((found.values[0] >= visible).sum())
        candidates, method = min(p, 2 * identifiable + OVERSAMPLING), "gram"
    else:
        method = "randomized"
    directions = min(identifiable, most)
    return Plan(method, identifiable, directions, min(p, candidates), edge, mean_edge, found)


def strengths(plan: Plan, noise: Noise, p: int, q: int) -> NDArray[np.float64]:
    """Return the strengths ``[K]`` that the mean shows, by the spiked model with its noise."""
    values = plan.mean.values[0, : plan.directions].cpu().numpy()
    return infer(values, noise.sigma / noise.replicates**0.5, p, q).strength


def _visible(noise: Noise, p: int, q: int) -> float:
    """Return the singular value in the mean from which on a direction is identifiable in a replicate."""
    weakest = infer(upper_edge(noise.sigma, p, q), noise.sigma, p, q).strength
    return float(predict(weakest, noise.sigma / noise.replicates**0.5, p, q).value)
