"""Quantiles of Student's t against SciPy's."""

from __future__ import annotations

import pytest
from scipy.special import stdtrit

from backlight.student_t import student_quantile


@pytest.mark.parametrize("freedom", [1, 1.3, 2, 2.7, 5, 9.3, 30, 511, 9999.5])
def test_quantiles_equal_those_of_scipy(freedom: float) -> None:
    for probability in (0.5, 0.75, 0.95, 0.975, 0.995, 0.9995):
        expected = pytest.approx(float(stdtrit(freedom, probability)), rel=1e-8, abs=1e-12)
        assert student_quantile(freedom, probability) == expected


@pytest.mark.parametrize(("freedom", "probability"), [(0.5, 0.9), (3, 0.4), (3, 1.0), (float("nan"), 0.9)])
def test_values_out_of_range_are_refused(freedom: float, probability: float) -> None:
    with pytest.raises(ValueError, match="expected freedom of 1 or more and a probability of at least"):
        student_quantile(freedom, probability)
