"""Fewer numbers for the page, with no spike lost.

A series that is longer than the screen is wide is cut into buckets of consecutive recorded steps. Of
every bucket the smallest and the largest value stay, so that what stands out in the run stands out
in the picture. Shapes: S recorded steps, P parameters, B buckets, K series of one chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Buckets:
    """Consecutive ranges of recorded steps; each of ``first``, ``last`` and ``recorded`` is ``[B]``.

    Bucket b covers the steps ``first[b] .. last[b]``, both included, of which ``recorded[b]`` were
    recorded.
    """

    first: Ints
    last: Ints
    recorded: Ints

    def __len__(self) -> int:
        return len(self.first)

    @property
    def exact(self) -> bool:
        """Whether every bucket is one step, so that nothing was reduced."""
        return bool((self.recorded <= 1).all())

    def offsets(self, steps: Ints) -> tuple[Ints, Ints]:
        """Return the buckets that ``steps`` (sorted) fall into and the index at which each begins."""
        index = np.searchsorted(self.first, steps, side="right") - 1
        starts = np.flatnonzero(np.diff(index, prepend=-1)) if len(index) else np.empty(0, np.int64)
        return index[starts].astype(np.int64), starts.astype(np.int64)


def cut(steps: Ints, most: int) -> Buckets:
    """Cut sorted ``steps`` [S] into at most ``most`` buckets with equally many recorded steps each."""
    size = min(len(steps), max(1, most))
    edges = np.linspace(0, len(steps), size + 1).round().astype(np.int64)
    return Buckets(steps[edges[:-1]], steps[edges[1:] - 1], np.diff(edges))


@dataclass(frozen=True)
class Extremes:
    """What is left of a frame: each array is ``[B, P]``.

    ``low`` and ``high`` are over the measured, finite values, NaN where a bucket has none.
    ``measured`` counts steps with a measurement, ``broken`` those whose value was not finite.
    """

    low: Floats
    high: Floats
    measured: Ints
    broken: Ints


def extremes(values: NDArray[np.generic], measured: Bools, steps: Ints, buckets: Buckets) -> Extremes:
    """Reduce a frame ``values`` [S, P] with its mask to the extremes of each bucket."""
    shape = (len(buckets), values.shape[1])
    low, high = np.full(shape, np.nan), np.full(shape, np.nan)
    counted, broken = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    into, starts = buckets.offsets(steps)
    if len(starts) and shape[1]:
        floats = values.astype(np.float64)
        bad = measured & ~np.isfinite(floats)
        floats[~measured | bad] = np.nan
        low[into] = np.fmin.reduceat(floats, starts, axis=0)
        high[into] = np.fmax.reduceat(floats, starts, axis=0)
        counted[into] = np.add.reduceat(measured, starts, axis=0, dtype=np.int64)
        broken[into] = np.add.reduceat(bad, starts, axis=0, dtype=np.int64)
    return Extremes(low, high, counted, broken)


def keep(columns: Sequence[Floats], present: Sequence[Bools], most: int) -> Ints:
    """Return the sorted indices of the points that a chart needs, all of them where S is at most ``most``.

    ``present`` tells where each of the K series has a value at all. The S points are cut into
    ``most // (2 K)`` buckets. Of each bucket stay the smallest and the largest finite value of every
    series and the first value that is not finite; so do the first and last point of all. What stays is
    a real point with its own step, never an average.
    """
    length = len(columns[0]) if columns else 0
    if length <= most:
        return np.arange(length)
    size = max(1, most // (2 * len(columns)))
    bucket = np.arange(length) * size // length
    chosen = [np.array([0, length - 1])]
    for column, there in zip(columns, present, strict=True):
        finite = np.isfinite(column) & there
        for sign in (1.0, -1.0):
            ranked = np.where(finite, sign * column, np.inf)
            order = np.lexsort((ranked, bucket))
            first = order[np.flatnonzero(np.diff(bucket[order], prepend=-1))]
            chosen.append(first[finite[first]])
        odd = np.flatnonzero(there & ~finite)
        chosen.append(odd[np.flatnonzero(np.diff(bucket[odd], prepend=-1))])
    return np.unique(np.concatenate(chosen))


def quantiles(values: Floats, shares: Sequence[float]) -> Floats:
    """Return ``[len(shares), S]``: nearest-rank quantiles of each row of ``values`` [S, P], NaN left out.

    Nearest rank, so that every number was a measurement. A row without a number gives NaN.
    """
    ordered = np.sort(values, axis=1)
    amount = np.isfinite(values).sum(axis=1)
    result = np.full((len(shares), len(values)), np.nan)
    rows = np.flatnonzero(amount)
    for place, share in enumerate(shares):
        rank = np.rint(share * (amount[rows] - 1)).astype(np.int64)
        result[place, rows] = ordered[rows, rank]
    return result
