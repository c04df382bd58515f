from __future__ import annotations

import numpy as np
import pytest

from backlight.findings.recorded_steps import (
    after_share,
    equal_parts,
    step_weights,
    weighted_median,
    weighted_share,
)

SAMPLED = np.array([*range(64), *range(64, 2048, 64), 2047])
"""Steps as a run records them without a request: most are the first ones."""


def test_dense_steps_weigh_one_each() -> None:
    assert step_weights(np.arange(7, 20)).tolist() == [1.0] * 13


def test_weights_add_up_to_the_steps_between_first_and_last() -> None:
    weights = step_weights(SAMPLED)
    assert weights.sum() == 2048
    assert weights[70] == 64
    assert len(step_weights(np.zeros(0, np.int64))) == 0
    assert step_weights(np.array([5])).tolist() == [1.0]


def test_share_of_sampled_steps_is_that_of_all_steps() -> None:
    late = SAMPLED >= 1024
    assert late.mean() < 0.2
    assert weighted_share(late, step_weights(SAMPLED)) == pytest.approx(0.5, abs=0.02)
    assert np.isnan(weighted_share(np.zeros(0, bool), np.zeros(0)))


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0], [4.0, 1.0, 2.0, 3.0], [np.nan, 7.0], [np.inf, np.nan]])
def test_median_with_equal_weights_is_the_median(values: list[float]) -> None:
    finite = [value for value in values if np.isfinite(value)]
    expected = np.median(finite) if finite else np.nan
    found = weighted_median(np.array(values), np.ones(len(values)))
    assert found == pytest.approx(expected, nan_ok=True)


def test_median_of_sampled_steps_is_that_of_all_steps() -> None:
    falling = 1.0 / (1.0 + SAMPLED)
    every = 1.0 / (1.0 + np.arange(2048))
    assert weighted_median(falling, step_weights(SAMPLED)) == pytest.approx(np.median(every), rel=0.05)


def test_parts_of_a_run_are_cut_by_step() -> None:
    assert SAMPLED[after_share(SAMPLED, 0.2)] >= 0.2 * 2047 > SAMPLED[after_share(SAMPLED, 0.2) - 1]
    assert after_share(np.zeros(0, np.int64), 0.2) == 0
    assert [after_share(np.array([10, 30, 110]), share) for share in (0.15, 0.21)] == [1, 2]
    parts = equal_parts(SAMPLED, 4)
    assert [int(SAMPLED[part][0]) for part in parts] == [0, 512, 1024, 1536]
    assert sum(len(SAMPLED[part]) for part in parts) == len(SAMPLED)
    assert equal_parts(np.zeros(0, np.int64), 2) == [slice(0, 0)] * 2
