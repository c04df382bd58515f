"""Where a curve changes its level, by the package ``ruptures`` where it is installed. No torch.

A change point is no verdict: a slow rise has several, and each says only that the level before it is
another one than after it.
"""

from __future__ import annotations

import importlib.util
import math

import numpy as np
from numpy.typing import NDArray

POINTS = 1000
"""Most logs that are looked at; of a longer curve evenly spread ones are."""

LEAST = 10
"""Fewest logs of a curve with a change."""

PENALTY = 6.0
"""Weight of one more change, times log(n) noise variances; the criterion of Schwarz has 2 for two numbers."""


def available() -> bool:
    """Tell whether ``ruptures`` is installed."""
    return importlib.util.find_spec("ruptures") is not None


def change_points(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[int, ...] | None:
    """Return the first steps ``after`` each change of level, by PELT (Killick et al. 2012).

    Parameters
    ----------
    steps, values:
        Sorted steps [S] and values [S]; what is not finite is left out.

    Returns
    -------
    Steps; None where ``ruptures`` is not installed, so that nothing is known.
    """
    if not available():
        return None
    import ruptures  # noqa: PLC0415 - an optional package, wanted only here

    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) < LEAST or np.ptp(values) == 0:
        return ()
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), POINTS)).round().astype(np.int64))
    steps, values = steps[kept], values[kept]
    # Noise from the differences: the median absolute one of white noise is .954 of its deviation.
    noise = float(np.median(np.abs(np.diff(values)))) / 0.954
    scale = max(noise, 1e-2 * float(np.ptp(values)))
    found = ruptures.Pelt(model="l2", min_size=3, jump=1).fit(values[:, None] / scale)
    ends = found.predict(pen=PENALTY * math.log(len(values)))
    return tuple(int(steps[end]) for end in ends[:-1])
