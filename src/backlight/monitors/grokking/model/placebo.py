"""Whether a measure follows the test accuracy more than it does in controls: permutation of run and control.

Had the labels no influence on a measure, its curves in runs and in controls would be exchangeable. The
statistic is computed for every way to choose as many curves as there are runs among all of them, so that
control against control gives a p-value of at most p in a share p of comparisons (docs/formulas.md, 4).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_SPLITS = 20_000
"""Splits that are enumerated; of more, so many are drawn."""

TIE = 1e-9
"""Relative difference below which two statistics are equal."""


def smallest_p(runs: int, controls: int) -> float:
    """Return the smallest p-value that so many runs and controls can give; 1 without either."""
    if not runs or not controls:
        return 1.0
    # Of equally many, a split and its complement have the same statistic.
    return (1 + (runs == controls)) / math.comb(runs + controls, runs)


def needed_of_each(measures: int, rate: float) -> int:
    """Return how many runs, and as many controls, can find one of ``measures`` at a false-discovery rate."""
    return next(n for n in itertools.count(2) if smallest_p(n, n) <= rate / max(1, measures))


def slopes(curves_RL: Floats, reference_L: Floats, most: int) -> Floats:
    """Return the change of each curve per unit of the reference, ``[R, 2 most + 1]``, at leads -most to most.

    At a positive lead the reference is taken so many logs later. Slopes and not correlations: a control whose
    curve moves a hundredth as far correlates just as well.
    """
    found, length = [], len(reference_L)
    for lead in range(-most, most + 1):
        values = curves_RL[:, : length - lead] if lead >= 0 else curves_RL[:, -lead:]
        later = reference_L[lead:] if lead >= 0 else reference_L[:lead]
        away = later - later.mean()
        square = float(away @ away)
        found.append(values @ away / square if square > 0 else np.zeros(len(curves_RL)))
    return np.stack(found, axis=1)


def permutation_p(slopes_RK: Floats, runs: int) -> float:
    """Return the p-value that the first ``runs`` of the curves have other slopes than the rest.

    The statistic is the largest, over the K leads, of the difference of the two means over the standard
    deviation of all R slopes: the search over leads is part of what is permuted.
    """
    count = len(slopes_RK)
    spread = slopes_RK.std(axis=0)
    scaled = (slopes_RK - slopes_RK.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    if not scaled.size or not 0 < runs < count:
        return 1.0
    # The scaled slopes sum to 0: the difference of means is proportional to the sum over the runs.
    statistic = np.abs(_splits(count, runs) @ scaled).max(axis=1)
    return float((statistic >= statistic[0] * (1 - TIE)).mean())


def _splits(count: int, runs: int) -> Floats:
    """Return rows of 0 and 1, ``[S, count]``, with ``runs`` ones each; the first row is the true split."""
    if math.comb(count, runs) <= MAX_SPLITS:
        chosen = np.array(list(itertools.combinations(range(count), runs)))
    else:
        draw = np.random.default_rng(0)
        drawn = np.argsort(draw.random((MAX_SPLITS - 1, count)), axis=1)[:, :runs]
        chosen = np.concatenate([np.arange(runs)[None], drawn])
    rows = np.zeros((len(chosen), count))
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    return rows
