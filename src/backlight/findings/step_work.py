"""What each step did: its optimizers, and how much work, since more forwards take longer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backlight.store.read.run import Run

Floats = NDArray[np.float64]

WORDS = {"forwards": "forwards", "addends": "values in the sum of its losses"}
"""Scalars that count what a step did, and what a sentence calls them."""


def work_of(run: Run, steps_S: NDArray[np.int64]) -> Floats:
    """Return the forwards of each step, or the values that its loss adds up, over their median.

    The larger of both ratios, of shape [S]; 1 where nothing was counted. A loss that is a mean is no larger
    for more forwards, so the ratio is a bound: it explains at most as much.
    """
    work_S = np.full(len(steps_S), np.nan)
    for name in WORDS:
        counted = run.scalar(name)
        if len(counted.steps) and len(steps_S):
            place_S = np.minimum(np.searchsorted(counted.steps, steps_S), len(counted.steps) - 1)
            ratio_S = counted.values[place_S] / np.nanmedian(counted.values)
            work_S = np.fmax(work_S, np.where(counted.steps[place_S] == steps_S, ratio_S, np.nan))
    return np.where(np.isfinite(work_S) & (work_S > 0), work_S, 1.0)


def optimizer_sets(run: Run, steps_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for the set of optimizers that stepped at each step, of shape [S]."""
    numbers = {
        name: int(name.split("/")[1]) for name in run.scalar_names("backlight") if name.startswith("lr/")
    }
    sets_S = np.zeros(len(steps_S), np.int64)
    for name, number in numbers.items():
        sets_S |= np.isin(steps_S, run.scalar(name).steps).astype(np.int64) << min(number, 62)
    return sets_S


def counts_at(run: Run, step: int, window: int) -> tuple[str, float, float] | None:
    """Return name, count and earlier median of what was counted at ``step``, where the count varies."""
    for name in WORDS:
        counted = run.scalar(name)
        row = int(np.searchsorted(counted.steps, step))
        if row and row < len(counted.steps) and counted.steps[row] == step:
            history = counted.values[max(0, row - window) : row]
            if history.min() < history.max() or counted.values[row] != history[0]:
                return name, float(counted.values[row]), float(np.median(history))
    return None
