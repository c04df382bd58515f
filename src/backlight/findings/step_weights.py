"""Weights of recorded steps: most of them are the first ones, and a late one stands for many."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

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
