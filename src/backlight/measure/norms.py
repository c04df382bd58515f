"""Partial norms joined without overflow: what is true of single values holds of their norms as well."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def root_sum_squares(values: ArrayLike, axis: int | None = None) -> NDArray[np.float64]:
    """Return the root of the sum of squares of ``values`` along ``axis`` (all of them by default).

    Squares are taken of values divided by a power of two near the largest one, so neither 1e300 nor
    1e-300 is lost. NaN stays NaN, also beside an infinity; of nothing the result is 0.
    """
    array = np.abs(np.asarray(values, dtype=np.float64))
    top = np.max(array, axis=axis, keepdims=True, initial=0.0)
    exponent = np.frexp(np.where(np.isfinite(top), top, 1.0))[1]
    scaled = np.ldexp(array, -exponent)
    root = np.sqrt(np.sum(np.square(scaled), axis=axis, keepdims=True))
    result = np.where(np.isfinite(top), np.ldexp(root, exponent), top)
    return np.asarray(np.squeeze(result, axis=axis), dtype=np.float64)
