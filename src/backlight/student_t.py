"""Quantiles of Student's t-distribution, for intervals around means."""

from __future__ import annotations

import math

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(80)


def student_quantile(freedom: float, probability: float) -> float:
    """Return the value that a variable with ``freedom`` degrees stays below with ``probability``.

    With ``t = sqrt(freedom) tan(angle)`` the density is proportional to ``cos(angle) ** (freedom - 1)``,
    which is integrated by quadrature; the angle is found by bisection. The relative error is below 1e-8 for
    up to 10,000 degrees and probabilities up to 0.9995.

    Raises
    ------
    ValueError
        If there is less than one degree of freedom, or the probability is not in [0.5, 1).
    """
    if not (freedom >= 1 and 0.5 <= probability < 1):
        raise ValueError(
            f"freedom={freedom}, probability={probability}: expected freedom of 1 or more and a probability "
            "of at least 0.5 and less than 1"
        )
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    # With many degrees the integrand is a bell of width 1 / sqrt(freedom), which the nodes must resolve.
    low, high = 0.0, min(math.pi / 2, 40 / math.sqrt(freedom))
    while high - low > 4e-16 * high:
        angle = (low + high) / 2
        if angle in {low, high}:
            break
        cosines = np.cos(angle / 2 * (_NODES + 1))
        area = scale * angle / 2 * float(_WEIGHTS @ cosines ** (freedom - 1))
        low, high = (angle, high) if area < probability - 0.5 else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
