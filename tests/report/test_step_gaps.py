"""Where a series was not recorded: breaks of its line, and stretches in which it is a sample."""

from __future__ import annotations

import numpy as np
import pytest

from backlight.report.charts import step_gaps, within

GROWING = [2**power for power in range(12)]


@pytest.mark.parametrize(
    ("steps", "breaks", "sampled", "every"),
    [
        (range(10), [], [], 1),
        ([], [], [], 1),
        ([7], [], [], 1),
        ([0, 100], [[0, 100]], [], 1),
        ([0, 100, 200], [], [[0, 200]], 100),
        (range(0, 300, 5), [], [[0, 295]], 5),
        ([*range(0, 2991, 10), 2999], [], [[0, 2999]], 10),
        ([*range(64), 80, 256, 1024, 2048], [[63, 80], [80, 256], [256, 1024], [1024, 2048]], [], 1),
        ([0, 1, 2, 4, 5, 6], [[2, 4]], [], 1),
        ([*range(20), *range(21, 600, 20)], [[19, 21]], [[21, 581]], 20),
        ([*range(0, 320, 16), *range(320, 330), *range(336, 640, 16)], [], [[0, 320], [329, 624]], 16),
        (GROWING, [[step, 2 * step] for step in GROWING[1:-1]], [], 1),
    ],
)
def test_breaks_and_samples(
    steps: list[int], breaks: list[list[int]], sampled: list[list[int]], every: int
) -> None:
    found = step_gaps(np.array(steps, np.int64))
    assert (found.breaks.tolist(), found.sampled.tolist(), found.every) == (breaks, sampled, every)


def test_one_of_each_window_is_a_sample() -> None:
    steps = np.arange(0, 4000, 8) + np.random.default_rng(0).integers(0, 8, 500)
    found = step_gaps(steps)
    assert found.every == pytest.approx(8, abs=1)
    assert not len(found.breaks)
    assert np.diff(found.sampled).sum() > 0.95 * 4000


def test_ends_of_a_range_are_not_within_it() -> None:
    ranges = np.array([[2, 5], [5, 7]])
    assert within(ranges, np.array([1.0, 2.0, 3.0, 5.0, 6.0, 7.0])).tolist() == [
        False, False, True, False, True, False,
    ]  # fmt: skip


def test_samples_of_two_optimizers_in_turn_are_as_dense_as_they_are_together() -> None:
    gaps = step_gaps(np.array([step for start in range(0, 120, 8) for step in (start, start + 1)]))
    assert gaps.every == 4
    assert gaps.sampled.tolist() == [[8, 105]]  # at either end too few are alike
