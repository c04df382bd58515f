"""Stable ranks at the price of one singular value: by search, not by a whole decomposition."""

from __future__ import annotations

import math

from torch import Tensor

from backlight.measure.spectra.decomposition import decompose
from backlight.measure.spectra.replicates import as_matrix, named, promoted, sum_squares
from backlight.monitors.spectra.model.errors import SpectraError


def stable_rank(matrix: Tensor, *, layer: str = "") -> float | None:
    """Return ``sum s^2 / s_1^2`` of a matrix, with s_1 to 1e-5 of itself; None for a zero matrix.

    Parameters
    ----------
    matrix
        A weight, gradient, update or momentum of two dimensions, or a convolution.
    layer
        What messages call it.

    Raises
    ------
    SpectraError
        If it holds NaN or infinite values.
    """
    a_pq = promoted(as_matrix(matrix.detach(), layer=layer))
    square = sum_squares(a_pq)
    if not math.isfinite(square):
        raise SpectraError(f"{named(layer)}: the matrix holds NaN or infinite values")
    if square == 0:
        return None
    a_pq = a_pq.T if a_pq.shape[0] > a_pq.shape[1] else a_pq
    found = decompose(a_pq[None], 1, method="randomized", layer=layer)
    return square / float(found.values[0, 0]) ** 2
