"""Recorded steps: how many steps each stands for, and what each did."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from backlight.store.read.run import Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def step_weights(steps_S: Integers) -> Floats:
    """Return how many steps of the run each recorded step stands for, of shape [S].

    A step between two recorded ones belongs to the nearer of them. The weights are 1 where every step is
    recorded, and add up to the steps from the first recorded one to the last.
    """
    if len(steps_S) == 0:
        return np.zeros(0)
    between = (steps_S[1:] + steps_S[:-1]) / 2
    edges = np.concatenate([[steps_S[0] - 0.5], between, [steps_S[-1] + 0.5]])
    return np.asarray(np.diff(edges), dtype=np.float64)


def weighted_share(marks_S: NDArray[np.bool_], weights_S: Floats) -> float:
    """Return the share of the steps that are marked; NaN where there are none."""
    whole = float(weights_S.sum())
    return float(weights_S[marks_S].sum()) / whole if whole > 0 else float("nan")


def weighted_median(values_S: Floats, weights_S: Floats) -> float:
    """Return the median of finite values in which each counts as many times as its weight; NaN for none."""
    finite_S = np.isfinite(values_S)
    order = np.argsort(values_S[finite_S], kind="stable")
    values, weights = values_S[finite_S][order], weights_S[finite_S][order]
    if len(values) == 0:
        return float("nan")
    below = np.cumsum(weights)
    half = below[-1] / 2
    row = int(np.searchsorted(below, half))
    is_between = np.isclose(below[row], half) and row + 1 < len(values)
    return float((values[row] + values[row + 1]) / 2) if is_between else float(values[row])


def after_share(steps_S: Integers, share: float) -> int:
    """Return the first row behind the first ``share`` of the steps between the first and the last one."""
    if len(steps_S) == 0:
        return 0
    return int(np.searchsorted(steps_S, steps_S[0] + share * (steps_S[-1] - steps_S[0])))


def equal_parts(steps_S: Integers, parts: int, last: int = 0) -> list[slice]:
    """Return the rows of ``parts`` stretches of as many steps each, up to ``last`` or the last recorded step.

    Some of them may hold no row.
    """
    if len(steps_S) == 0:
        return [slice(0, 0)] * parts
    bounds = np.searchsorted(steps_S, np.linspace(steps_S[0], max(last, int(steps_S[-1])) + 1, parts + 1))
    return [slice(int(low), int(high)) for low, high in itertools.pairwise(bounds)]


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
