"""Which direction of one replicate is which direction of a reference.

K directions of a reference, J >= K candidates of a replicate. An alignment never uses a candidate twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

Float64 = NDArray[np.float64]
Method = Literal["hungarian", "greedy"]


@dataclass(frozen=True)
class Alignment:
    """Candidates assigned to the directions of a reference; every array is ``[K]``.

    Attributes
    ----------
    permutation
        Candidate that is direction i; no candidate twice.
    score
        Product of the overlaps on both sides, in [0, 1].
    ambiguity
        Score minus that of the best other candidate, in [-1, 1]: small where the choice was a toss-up,
        negative where a better candidate was needed elsewhere.
    """

    permutation: NDArray[np.int64]
    score: Float64
    ambiguity: Float64


def overlap_scores(left_JK: ArrayLike, right_JK: ArrayLike) -> Float64:
    """Return the scores ``|U_a^T U_ref| o |V_a^T V_ref|`` ``[J, K]`` of two matrices of inner products."""
    return np.abs(np.asarray(left_JK, dtype=np.float64)) * np.abs(np.asarray(right_JK, dtype=np.float64))


def align(score_JK: ArrayLike, *, method: Method = "hungarian") -> Alignment:
    """Assign a candidate to every direction of a reference.

    Parameters
    ----------
    score_JK
        Score of candidate j as direction i, ``[J, K]`` with J >= K, as of :func:`overlap_scores`.
    method
        ``"hungarian"`` makes the sum of scores as large as can be (``scipy.optimize``);
        ``"greedy"`` takes the largest score of all, then the largest of what is left, and so on. Among
        equal scores it takes the lowest candidate first. Both give the same answer every time.

    Raises
    ------
    ValueError
        If there are fewer candidates than directions, a score is not finite, or the method is unknown.
    """
    score = np.asarray(score_JK, dtype=np.float64)
    if score.ndim != 2 or score.shape[0] < score.shape[1]:
        raise ValueError(f"expected scores [J, K] with at least K candidates, got shape {score.shape}")
    if not np.isfinite(score).all():
        raise ValueError("scores must be finite: a singular vector holds NaN or infinite values")
    if method == "hungarian":
        chosen = linear_sum_assignment(score.T, maximize=True)[1].astype(np.int64)
    elif method == "greedy":
        chosen = _greedy(score)
    else:
        raise ValueError(f"method must be 'hungarian' or 'greedy', got {method!r}")
    columns = np.arange(score.shape[1])
    taken = score[chosen, columns]
    others = score.copy()
    others[chosen, columns] = -np.inf
    second = np.max(others, axis=0, initial=-np.inf)
    return Alignment(chosen, taken, taken - np.where(np.isfinite(second), second, 0.0))


def _greedy(score: Float64) -> NDArray[np.int64]:
    """Take, in each round, every pair that is the best of its row and of its column.

    Such a pair is taken by the one-by-one search as well, whatever else that takes before it.
    """
    left = score.copy()
    rows, columns = np.arange(score.shape[0]), np.arange(score.shape[1])
    chosen = np.full(score.shape[1], -1, dtype=np.int64)
    while columns.size:
        best_row = np.argmax(left, axis=0)
        best_column = np.argmax(left, axis=1)
        mutual = best_column[best_row] == np.arange(columns.size)
        taken = best_row[mutual]
        chosen[columns[mutual]] = rows[taken]
        keep = np.ones(rows.size, dtype=bool)
        keep[taken] = False
        left = left[np.ix_(keep, ~mutual)]
        rows, columns = rows[keep], columns[~mutual]
    return chosen
