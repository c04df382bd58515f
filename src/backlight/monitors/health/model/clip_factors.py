"""By what factor clipping scales the gradient at each step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backlight.store.read.run import Run


def clip_factors(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps at which clipping was called, and by what factor it scales the gradient at each.

    The norm that clipping computes is known at every step, the factor at those that were recorded: between
    them the clip norm that was recorded last holds.
    """
    factor, norm, limit = (run.scalar(f"clip/{name}") for name in ("factor", "norm", "limit"))
    steps, values = factor.steps, factor.values
    if len(norm.steps) > len(steps) and len(limit.steps):
        rows = np.maximum(np.searchsorted(limit.steps, norm.steps, "right") - 1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps, values = norm.steps, np.minimum(limit.values[rows] / norm.values, 1.0)
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]
