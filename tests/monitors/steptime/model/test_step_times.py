"""Steady parts, intervals and differences on seeded series with known answers."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from backlight.monitors.steptime.model.step_times import (
    ASSUMED,
    SeriesError,
    difference,
    find_steady,
    measure_variation,
    paired_difference,
    summarize,
)

Floats = npt.NDArray[np.float64]


def noisy(seed: int, steps: int = 120, level: float = 0.05, correlation: float = 0.5) -> Floats:
    """Return correlated step times with occasional outliers, like those of real machines."""
    random = np.random.default_rng(seed)
    noise = np.zeros(steps)
    for step in range(1, steps):
        noise[step] = correlation * noise[step - 1] + random.normal(0, 0.01)
    values = level * np.exp(noise)
    values[random.random(steps) < 0.03] *= 3
    return values


def test_warmup_is_found() -> None:
    cold = np.concatenate([[2.0], 0.05 * (1 + 2.0 ** -np.arange(0, 8)), np.full(40, 0.05)])
    steady = find_steady(cold)
    assert steady.first == 2.0
    assert 3 <= steady.warmup <= 9
    assert np.median(steady.values) == pytest.approx(0.05, rel=0.01)
    assert not steady.trouble


@pytest.mark.parametrize(
    ("series", "warmup", "trouble"),
    [
        (np.full(30, 0.02), 1, ""),
        (0.01 * 1.05 ** np.arange(60), 60, "kept moving"),
        (np.concatenate([np.full(30, 0.02), np.full(30, 0.03)]), 1, "+50% against the first"),
        (np.full(10, 0.02), 10, "10 steps are too few"),
    ],
)
def test_steady_part_and_its_trouble(series: Floats, warmup: int, trouble: str) -> None:
    steady = find_steady(series)
    assert (steady.warmup, len(steady.values)) == (warmup, len(series) - warmup)
    assert trouble in steady.trouble
    assert bool(trouble) == bool(steady.trouble)


def test_outlier_changes_neither_warmup_nor_median() -> None:
    values = np.full(40, 0.02)
    values[[4, 20]] = 1.0
    steady = find_steady(values)
    assert (steady.warmup, summarize(steady.values).median) == (1, 0.02)


def test_summary_has_order_statistics() -> None:
    summary = summarize(np.arange(1.0, 102.0))
    assert (summary.count, summary.median, summary.mad, summary.p95) == (101, 51.0, 25.0, 96.0)


@pytest.mark.slow
def test_summary_interval_has_its_coverage() -> None:
    held = [s.low <= 0.05 <= s.high for s in (summarize(noisy(seed)) for seed in range(200))]
    assert np.mean(held) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_equal_runs_rarely_differ(correlation: float) -> None:
    pairs = [
        (noisy(s, correlation=correlation), noisy(s + 10_000, correlation=correlation)) for s in range(150)
    ]
    assert np.mean([difference(*pair).is_significant for pair in pairs]) <= 0.05


@pytest.mark.slow
def test_three_percent_are_found_with_coverage() -> None:
    found = [difference(noisy(seed), noisy(seed + 10_000, level=0.05 * 1.03)) for seed in range(100)]
    assert np.mean([d.low <= 1.03 <= d.high for d in found]) >= 0.92
    assert np.mean([d.is_significant for d in found]) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [0, 3, 5])
def test_equal_runs_that_vary_rarely_differ(repeats: int) -> None:
    random = np.random.default_rng(0)

    def run(seed: int) -> Floats:
        return noisy(seed) * np.exp(random.normal(0, 0.01))

    found = []
    for seed in range(0, 200 * 7, 7):
        group = [run(seed + number) for number in range(1, 1 + max(1, repeats))]
        variation = measure_variation([[float(np.median(each)) for each in group]])
        assert variation.is_measured == bool(repeats)
        found.append(difference(group[0], run(seed), 0.95, variation).is_significant)
    assert np.mean(found) <= 0.05


def test_variation_is_measured_within_groups_of_repeats() -> None:
    groups = [[1.0, 1.01, 1.02], [2.0, 2.04]]
    squares = sum(len(g) * np.var(np.log(g)) for g in groups)
    assert measure_variation(groups).deviation == pytest.approx(np.sqrt(squares / 3))
    assert measure_variation(groups).freedom == 3
    # Two repeats can widen what is assumed, and never narrow it.
    assert measure_variation([[1.0]]) == measure_variation([[1.0, 1.0001]]) == ASSUMED
    assert measure_variation([[1.0, 1.2]]).deviation > ASSUMED.deviation


def test_pairing_cancels_shared_noise() -> None:
    random = np.random.default_rng(0)
    disturbance = np.exp(random.normal(0, 0.2, 12))
    before = 0.05 * disturbance * np.exp(random.normal(0, 0.004, 12))
    after = 0.05 * 1.03 * disturbance * np.exp(random.normal(0, 0.004, 12))
    paired = paired_difference(before, after)
    assert paired.is_significant
    assert paired.low <= 1.03 <= paired.high
    assert not difference(before, after).is_significant


def test_constant_series_differ_exactly() -> None:
    same = difference(np.full(20, 0.5), np.full(20, 0.5))
    slower = difference(np.full(20, 0.5), np.full(20, 0.6))
    assert not same.is_significant
    assert slower.is_significant
    assert slower.ratio == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_steady([]), "expected times of one or more steps"),
        (lambda: find_steady([0.1, float("nan")]), "step 1 took nan s"),
        (lambda: summarize([0.1, -0.1, 0.1, 0.1]), r"step 1 took -0.1 s: expected a finite time"),
        (lambda: summarize([0.1, 0.1]), "2 steps: an interval takes 4 or more"),
        (lambda: difference([0.1] * 9, [0.0] * 9), "step 0 took 0.0 s"),
        (lambda: paired_difference([0.1] * 3, [0.1] * 4), "3 medians against 4"),
        (lambda: paired_difference([0.1] * 2, [0.1] * 2), "2 pairs: an interval takes 3"),
    ],
)
def test_invalid_series_is_rejected(call: object, message: str) -> None:
    with pytest.raises(SeriesError, match=message):
        call()  # type: ignore[operator]


def test_paired_interval_matches_scipy() -> None:
    before, after = noisy(0, 12), noisy(1, 12)
    found = paired_difference(before, after, 0.95)
    expected = stats.ttest_1samp(np.log(after / before), 0).confidence_interval(0.95)
    assert np.log([found.low, found.high]) == pytest.approx([expected.low, expected.high])


def test_uncorrelated_interval_matches_welch() -> None:
    # Steps are nearly uncorrelated; the standard error of their correlation widens the interval a little.
    before, after = (np.exp(np.random.default_rng(seed).normal(0, 0.01, 400)) for seed in (0, 1))
    found = difference(before, after, 0.95)
    medians = [[np.median(batch) for batch in np.array_split(np.log(side), 8)] for side in (before, after)]
    expected = stats.ttest_ind(medians[1], medians[0], equal_var=False).confidence_interval(0.95)
    assert np.log(found.high / found.low) >= expected.high - expected.low
    assert np.log(found.high / found.low) == pytest.approx(expected.high - expected.low, rel=0.35)
    assert found.ratio == np.median(after) / np.median(before)
