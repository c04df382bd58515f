"""What is slow: limits, and the lower ends of the intervals of a median and of a share."""

from __future__ import annotations

import numpy as np
import pytest

from backlight.trace.step_limits import is_slow, lower_median, lower_share


def test_slow_needs_the_share_and_its_interval() -> None:
    assert is_slow(0.21, 0.11)
    assert not is_slow(0.2, 0.11)
    assert not is_slow(0.5, 0.1)


def test_lower_median_is_the_order_statistic_of_the_sign_test() -> None:
    """Binomial tails of a fair coin: of 5 none, of 8 the second value is too high, of 60 the 24th."""
    assert lower_median(range(1, 5)) == 0.0
    assert lower_median(range(1, 6)) == 1
    assert lower_median(range(1, 9)) == 2
    assert lower_median(range(60, 0, -1)) == 24
    assert lower_median([]) == 0.0


@pytest.mark.parametrize(("part", "whole"), [(7, 7), (4, 10), (1, 50)])
def test_lower_share_is_the_share_from_which_the_sample_is_as_far_as_the_quantile(
    part: int, whole: int
) -> None:
    low = lower_share(part, whole)
    assert 0 < low < part / whole
    assert (part / whole - low) ** 2 == pytest.approx(1.6449**2 * low * (1 - low) / whole)


def test_lower_share_of_nothing_is_zero() -> None:
    assert lower_share(0, 9) == lower_share(0, 0) == 0.0


def test_the_intervals_hold_the_truth_in_95_of_100_cases() -> None:
    random = np.random.default_rng(0)
    shares = random.binomial(40, 0.25, 4000)
    assert np.mean([lower_share(int(part), 40) <= 0.25 for part in shares]) >= 0.94
    medians = [lower_median(random.exponential(1.0, 25).tolist()) <= np.log(2) for _ in range(2000)]
    assert np.mean(medians) >= 0.94
