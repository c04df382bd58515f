"""Partial norms joined without overflow: the root of a sum of squares, of values or of norms of parts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def root_sum_squares(values: ArrayLike, axis: int | None = None) -> Float64:
    """Return the root of the sum of squares of ``values`` along ``axis`` (all of them by default).

    Squares are taken of values divided by a power of two near the largest one, so neither 1e300 nor
    1e-300 is lost. NaN stays NaN, also beside an infinity; of nothing the result is 0.
    """
    array = np.abs(np.asarray(values, dtype=np.float64))
    top = np.max(array, axis=axis, keepdims=True, initial=0.0)
    exponent = _exponent(top)
    with np.errstate(over="ignore"):
        squares = np.square(np.ldexp(array, -exponent))
        root = np.ldexp(np.sqrt(np.sum(squares, axis=axis, keepdims=True)), exponent)
    result = np.where(np.isfinite(top), root, top)
    return np.asarray(np.squeeze(result, axis=axis), dtype=np.float64)


def root_sum_squares_by(owner: NDArray[np.int64], values: Float64, owners: int) -> Float64:
    """Return, for each of ``owners``, the root of the sum of squares of the values that it owns.

    ``owner`` has the shape of ``values`` ``[N]``; the result is ``[owners]``, 0 for who owns nothing.
    """
    array = np.abs(values)
    top = max_by(owner, array, owners)
    exponent = _exponent(top)
    with np.errstate(over="ignore"):
        squares = np.square(np.ldexp(array, -exponent[owner]))
        root = np.ldexp(np.sqrt(np.bincount(owner, squares, owners)), exponent)
    return np.where(np.isfinite(top), root, top)


def max_by(owner: NDArray[np.int64], values: Float64, owners: int) -> Float64:
    """Return the largest of the non-negative values of each owner ``[owners]``; NaN wins, 0 for nothing."""
    top = np.zeros(owners)
    with np.errstate(invalid="ignore"):  # a NaN is an answer here
        np.maximum.at(top, owner, values)
    return top


def _exponent(top: Float64) -> NDArray[np.int32]:
    return np.asarray(np.frexp(np.where(np.isfinite(top), top, 1.0))[1], dtype=np.int32)
