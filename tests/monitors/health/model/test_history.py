import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.monitors.health.model.history import (
    at_steps,
    ending,
    ending_share,
    ending_streak,
    finite_median,
    median_and_deviation,
    medians_outrun,
    stretches,
)

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_finite_median_matches_numpy(rows: list[list[float]]) -> None:
    values = np.array(rows).T
    expected = [np.median(v[np.isfinite(v)]) if np.isfinite(v).any() else np.nan for v in values]
    np.testing.assert_allclose(finite_median(values), expected, rtol=1e-12)


def test_finite_median_requires_a_minimum_count() -> None:
    values = np.array([[1.0, np.nan, 3.0], [np.inf, np.nan, 3.0]])
    np.testing.assert_array_equal(finite_median(values, 2), [2.0, np.nan])
    assert np.isnan(finite_median(np.zeros((2, 0)))).all()


def test_running_median_is_causal() -> None:
    values = np.random.default_rng(0).lognormal(size=(300, 4))
    _, whole = medians_outrun(values, 64, 8, 5, 0.0)
    changed = values.copy()
    changed[200:] *= 1e9
    _, medians = medians_outrun(changed, 64, 8, 5, 0.0)
    np.testing.assert_array_equal(medians[:201], whole[:201])


def test_deviation_of_standard_normal_is_one() -> None:
    median, spread = median_and_deviation(np.random.default_rng(0).normal(size=20_001))
    assert median == pytest.approx(0.0, abs=0.02)
    assert spread == pytest.approx(1.0, abs=0.02)


def test_endings_count_measured_rows_only() -> None:
    hits = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]], dtype=bool)
    measured = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]], dtype=bool)
    assert ending_streak(hits, measured).tolist() == [1, 3, 2]
    np.testing.assert_array_equal(ending_share(hits, measured, 3), [2 / 3, 1.0, np.nan])


def test_stretches_and_steps() -> None:
    assert [s.tolist() for s in stretches(np.array([1, 2, 5, 9]), 3)] == [[1, 2, 5], [9]]
    assert stretches(np.zeros(0, dtype=np.int64), 3) == []
    found = at_steps(np.array([0, 5, 7]), np.array([5, 6]), np.array([1.5, 2.5]))
    np.testing.assert_array_equal(found, [np.nan, 1.5, np.nan])
    assert np.isnan(at_steps(np.array([3]), np.zeros(0, dtype=np.int64), np.zeros(0))).all()


@pytest.mark.parametrize("seed", range(20))
def test_window_of_each_column_is_behind_the_ending(seed: int) -> None:
    draw = np.random.default_rng(seed)
    window = int(draw.integers(1, 6))
    measured = draw.random((int(draw.integers(1, 90)), 4)) < draw.choice([0.05, 0.3, 1.0], 4)
    measured[: len(measured) // 2, 0] = False  # and one that is first measured late
    start = ending(measured, window)
    behind = measured[start:].sum(axis=0)
    assert ((behind >= window) | (behind == measured.sum(axis=0))).all()
    assert start == 0 or len(measured) - start in {window * 4**power for power in range(4)}
