"""Joined norms at any magnitude."""

import math

import numpy as np
import pytest

from backlight.measure.stats.kernels import max_by, root_sum_squares, root_sum_squares_by


def test_root_sum_squares_along_axis():
    values = np.array([[3.0, 4.0], [5.0, 12.0]])
    assert root_sum_squares(values) == pytest.approx(math.sqrt(194))
    assert root_sum_squares(values, axis=1).tolist() == [5.0, 13.0]
    assert root_sum_squares(values, axis=0).tolist() == pytest.approx([math.sqrt(34), math.sqrt(160)])


@pytest.mark.parametrize("unit", [1e300, 1e-300, 5e-324, 1.0])
def test_root_sum_squares_at_any_magnitude(unit):
    assert float(root_sum_squares([3 * unit, 4 * unit])) == pytest.approx(5 * unit, rel=1e-15)


def test_roots_of_nothing_and_of_non_finite_values():
    assert root_sum_squares([]) == 0.0
    assert root_sum_squares(np.empty((0, 3)), axis=0).tolist() == [0.0, 0.0, 0.0]
    assert math.isnan(root_sum_squares([1.0, math.nan, math.inf]))
    assert root_sum_squares([1.0, -math.inf]) == math.inf


def test_root_sum_squares_by_owner():
    owner = np.array([2, 0, 2, 0, 3, 3])
    values = np.array([3e200, 3e-200, 4e200, 4e-200, math.nan, 1.0])
    result = root_sum_squares_by(owner, values, 5)
    np.testing.assert_allclose(result, [5e-200, 0.0, 5e200, math.nan, 0.0], rtol=1e-15)
    np.testing.assert_array_equal(max_by(owner, values, 5), [4e-200, 0.0, 4e200, math.nan, 0.0])
