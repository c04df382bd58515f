import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.monitors.health.model.history import (
    RunningMedian,
    at_steps,
    ending_share,
    ending_streak,
    finite_median,
    median_and_deviation,
    running_median,
    stretches,
)

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_finite_median_is_numpys_over_the_finite_ones(rows: list[list[float]]) -> None:
    values = np.array(rows).T
    expected = [np.median(v[np.isfinite(v)]) if np.isfinite(v).any() else np.nan for v in values]
    np.testing.assert_allclose(finite_median(values), expected, rtol=1e-12)


def test_the_finite_median_wants_a_minimum() -> None:
    values = np.array([[1.0, np.nan, 3.0], [np.inf, np.nan, 3.0]])
    np.testing.assert_array_equal(finite_median(values, 2), [2.0, np.nan])
    assert np.isnan(finite_median(np.zeros((2, 0)))).all()


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 12), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_running_median_against_its_definition(seed: int, steps: int, window: int, refresh: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=(steps, 3))
    values[random.random((steps, 3)) < 0.2] = np.nan
    values[random.random((steps, 3)) < 0.1] = np.inf
    medians = running_median(values, window, refresh, 2)
    streaming = RunningMedian(window, refresh, 2)
    for row in range(steps):
        known = row if row < refresh else row - row % refresh
        history = values[max(0, known - window) : known]
        for column in range(3):
            finite = history[:, column][np.isfinite(history[:, column])]
            expected = np.median(finite) if len(finite) >= 2 else np.nan
            np.testing.assert_allclose(medians[row, column], expected)
        if streaming.value is not None:
            np.testing.assert_array_equal(streaming.value, medians[row])
        streaming.add(values[row])


def test_the_running_median_knows_nothing_of_what_follows() -> None:
    values = np.random.default_rng(0).lognormal(size=(300, 4))
    whole = running_median(values, 64, 8, 5)
    changed = values.copy()
    changed[200:] *= 1e9
    np.testing.assert_array_equal(running_median(changed, 64, 8, 5)[:201], whole[:201])


def test_other_columns_start_a_new_history() -> None:
    streaming = RunningMedian(8, 4, 1)
    streaming.add(np.ones(2))
    streaming.add(np.full(3, 5.0))
    assert streaming.value is not None
    np.testing.assert_array_equal(streaming.value, [5.0, 5.0, 5.0])


def test_ten_thousand_steps_of_five_hundred_parameters_take_seconds() -> None:
    values = np.random.default_rng(0).lognormal(size=(10_000, 500))
    begun = time.process_time()
    running_median(values, 256, 16, 5)
    assert time.process_time() - begun < 15  # about 1.1 s where it was written


def test_the_deviation_of_normal_numbers_is_one() -> None:
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
