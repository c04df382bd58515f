"""The grokking verdict: curves for each verdict, and curves that are not grokking."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.monitors.grokking.model import curves
from backlight.monitors.grokking.model.curves import DetectionError, StepInterval
from backlight.monitors.grokking.model.detection import detect
from backlight.monitors.grokking.model.verdicts import Detection, GrokkingVerdict, VerdictLimits

STEPS = np.arange(0, 5001, 10)
DIPS = (STEPS > 100) & (STEPS % 70 == 0)
CHANCE, SIZE = 0.043, 265


def rise(at: float, width: float, low: float = CHANCE, high: float = 1.0, seed: int = 0) -> np.ndarray:
    """Return an accuracy that rises at a step, counted over SIZE samples, with noise."""
    noise = np.random.default_rng(seed).normal(0, 0.01, len(STEPS))
    share = low + (high - low) / (1 + np.exp(-np.clip((STEPS - at) / width, -60, 60))) + noise
    return np.rint(np.clip(share, 0.004, 1) * SIZE) / SIZE


def fitted(at: float = 25.0) -> np.ndarray:
    return np.clip(1 / (1 + np.exp(-np.clip((STEPS - at) / 2, -60, 60))), 0, 1)


def evaluated(train: np.ndarray, test: np.ndarray, steps: np.ndarray = STEPS, **more: object) -> Detection:
    return detect(steps, train, steps, test, **{"chance": CHANCE, "test_size": SIZE, **more})


def test_delayed_generalisation_is_strong_grokking_with_its_intervals() -> None:
    found = evaluated(fitted(), rise(900, 20))
    assert found.verdict is GrokkingVerdict.GROKKING
    assert found.strong
    assert found.memorised == StepInterval(30, 40)
    test = rise(900, 20)
    first = int(np.argmax(test >= 0.95))
    assert found.generalised == StepInterval(int(STEPS[first - 1]), int(STEPS[first]))
    assert found.ratio == pytest.approx((STEPS[first - 1] / 40, STEPS[first] / 30))
    assert all(condition.held for condition in found.conditions)
    assert len(found.sweep) == 12
    assert all(point.grokking for point in found.sweep)
    assert sorted({p.train_accuracy for p in found.sweep}) == pytest.approx([0.9, 0.93, 0.96, 0.99])


def test_delay_below_five_is_not_called_strong() -> None:
    found = evaluated(fitted(300), rise(900, 10))
    assert found.verdict is GrokkingVerdict.GROKKING
    assert not found.strong
    assert 2 <= found.ratio[0] < 5
    near = evaluated(fitted(410), rise(850, 10))
    assert near.verdict is GrokkingVerdict.GROKKING
    assert any("near the limit of 2 times" in note for note in near.notes)
    assert not any("near the limit" in note for note in found.notes)


@pytest.mark.parametrize(
    ("train", "test", "verdict", "claim"),
    [
        (fitted(), rise(1e9, 1), "memorised", "did not generalise until step 5000"),
        (fitted(), rise(30, 4), "no-delay", "about when it memorised"),
        (0.6 * fitted(), rise(1e9, 1), "not-fitted", "highest value is 0.6"),
        (fitted(), np.where(STEPS < 60, rise(30, 4), rise(60, 1, 0.9)) * 0.2, "memorised", "at most 0.2"),
        (fitted(), rise(5500, 400), "censored", "while its test accuracy rises"),
        (fitted(1500), rise(1e9, 1), "censored", "too early to say"),
        (fitted(5020), rise(1e9, 1), "not-fitted", "did not reach 0.99"),
        (np.where(DIPS, 0.5, fitted()), rise(900, 20), "unstable", "a recovery, not grokking"),
        (np.where(STEPS % 40 == 0, 0.5, 1.0), rise(900, 20), "unstable", "never for 5 in a row"),
        (fitted(), np.where((STEPS > 900) & (STEPS < 1500), 0.99, CHANCE), "unstable", ""),
        (fitted(), rise(900, 20, high=0.12), "memorised", ""),
        (fitted(), rise(900, 20, low=0.7), "no-delay", "more than half way"),
        (
            fitted(),
            np.where(STEPS < 1000, 0.05, rise(30, 4)),
            "insufficient-data",
            "exactly 0.05 at every log",
        ),
        (np.ones(len(STEPS)), rise(900, 20), "insufficient-data", "had memorised at its first log"),
    ],
)
def test_every_other_verdict(train: np.ndarray, test: np.ndarray, verdict: str, claim: str) -> None:
    found = evaluated(train, test)
    assert (found.verdict, claim in found.claim) == (verdict, True), found


def log_rise(at: float, decades: float, low: float = CHANCE) -> np.ndarray:
    """Return a logistic rise over log steps, ``decades`` from a quarter to three quarters."""
    away = (np.log10(np.maximum(STEPS, 1)) - np.log10(at)) / decades * 2 * np.log(3)
    return low + (1 - low) / (1 + np.exp(-np.clip(away, -60, 60)))


@pytest.mark.parametrize("decades", [0.1, 0.25, 0.36, 0.41, 0.5])
@pytest.mark.parametrize("low", [CHANCE, 0.5])
def test_width_of_rise_is_measured_in_decades(decades: float, low: float) -> None:
    found = evaluated(fitted(), log_rise(400, decades, low), chance=low, test_size=20_000)
    assert found.transition.decades == pytest.approx(decades, abs=0.02)
    assert found.transition.distance == pytest.approx(np.log10(400 / 40), abs=0.02)
    low_decades, high_decades = found.transition.interval
    assert low_decades < decades < high_decades
    expected = {0.1: "sharp", 0.25: "sharp", 0.36: "sharp", 0.41: "intermediate", 0.5: "gradual"}
    assert found.transition.sharpness == expected[decades]
    # The delay is the verdict, whatever the shape of the rise.
    assert (found.verdict, found.strong) == (GrokkingVerdict.GROKKING, True)
    assert f"The rise is {expected[decades]}: its middle half" in found.claim


def test_interval_of_width_narrows_with_samples_and_logs() -> None:
    def width(size: int, every: int) -> float:
        test = np.rint(log_rise(700, 0.36) * size) / size
        found = detect(
            STEPS[::every], fitted()[::every], STEPS[::every], test[::every], chance=CHANCE, test_size=size
        )
        low, high = found.transition.interval
        return high - low

    assert width(100_000, 1) < 0.03 < width(1000, 1) < width(200, 1)
    assert width(100_000, 1) < width(100_000, 5)


def test_rise_whose_middle_comes_with_the_fit_has_no_delay() -> None:
    # A power law from the fit reaches 95 % of its way at 7 times, and half of it at 1.6 times the fit.
    law = CHANCE + (1 - CHANCE) * (1 - np.minimum(1, (np.maximum(STEPS, 1) / 40) ** -1.5))
    found = evaluated(fitted(), law)
    assert found.ratio[0] > 5
    assert (found.verdict, "a slow end, but no delay" in found.claim) == (GrokkingVerdict.NO_DELAY, True)
    late = evaluated(fitted(), log_rise(700, 0.7))
    assert next(c for c in late.conditions if c.name == "delay of half the rise").held


@pytest.mark.parametrize("low", [CHANCE, 0.5])
@pytest.mark.parametrize("peak", [0.4, 0.6, 0.8])
def test_double_descent_is_not_grokking(low: float, peak: float) -> None:
    first = np.where((STEPS >= 10) & (STEPS < 40), peak, np.where(STEPS < 10, 0, 0.1))
    late = np.maximum(first, (log_rise(900, 0.1, 0.0)))
    found = evaluated(fitted(), low + (1 - low) * late, chance=low)
    assert (found.verdict, "double descent" in found.claim) == ("unstable", True), found
    # The same without the first rise groks.
    bare = evaluated(fitted(), low + (1 - low) * np.maximum(log_rise(900, 0.1, 0.0), 0.05), chance=low)
    assert bare.verdict is GrokkingVerdict.GROKKING


def test_delay_of_fewer_steps_than_the_memory_of_an_optimizer_is_none() -> None:
    steps = np.arange(400)
    train = np.where(steps >= 5, 1.0, steps / 5)
    for at, verdict in ((20, "no-delay"), (180, "grokking")):
        test = CHANCE + (1 - CHANCE) / (1 + np.exp(-np.clip((steps - at) / 1.5, -60, 60)))
        found = detect(steps, train, steps, test, chance=CHANCE, test_size=SIZE)
        assert found.verdict == verdict, found
    assert found.ratio[0] > 5


def test_training_data_that_are_fitted_twice_are_no_grokking() -> None:
    test = np.where(STEPS < 1000, 0.06 + STEPS / 1e6, 0.999)
    for dip, verdict in ((0.6, "unstable"), (0.95, "grokking")):
        train = np.where((STEPS >= 1000) & (STEPS < 1040), dip, fitted())
        assert evaluated(train, test).verdict == verdict
    # A dip at another time explains nothing.
    train = np.where((STEPS >= 300) & (STEPS < 320), 0.6, fitted())
    assert evaluated(train, test).verdict == "grokking"


def test_threshold_is_relative_to_plateau() -> None:
    found = evaluated(fitted(), rise(900, 20, high=0.8))
    assert found.verdict is GrokkingVerdict.GROKKING
    assert found.plateau == pytest.approx(0.8, abs=0.03)
    assert found.test_accuracy == pytest.approx(CHANCE + 0.95 * (found.plateau - CHANCE))


def test_filler_zeros_count_as_missing() -> None:
    early = rise(30, 4)
    late = np.where(STEPS < 1000, 0.0, early)  # the test set was evaluated from step 1000 on
    found = evaluated(fitted(), late)
    assert found.verdict is GrokkingVerdict.INSUFFICIENT_DATA
    assert "filled in" in found.claim
    assert found.generalised == StepInterval(0, 1000)
    sparse = np.where(STEPS % 100, 0.0, rise(900, 20))  # and at every tenth log
    assert evaluated(fitted(), sparse).verdict is GrokkingVerdict.INSUFFICIENT_DATA
    pairs = np.where(STEPS % 30, 0.0, early)
    assert evaluated(fitted(), pairs).verdict is not GrokkingVerdict.GROKKING
    # The same logs omitted.
    kept = STEPS >= 1000
    omitted = detect(STEPS, fitted(), STEPS[kept], early[kept], chance=CHANCE, test_size=SIZE)
    assert omitted.verdict is GrokkingVerdict.INSUFFICIENT_DATA
    assert omitted.generalised == StepInterval(0, 1000)


def test_true_zeros_are_kept_if_chance_is_zero() -> None:
    test = np.where(STEPS < 600, 0.0, rise(900, 30, low=0.0))
    assert evaluated(fitted(), test, chance=0.0).verdict is GrokkingVerdict.GROKKING
    assert evaluated(fitted(), test).verdict is GrokkingVerdict.INSUFFICIENT_DATA
    zeros = curves.read_curve(STEPS, test, "test accuracy")
    assert not curves.doubted_zeros(zeros, 5, plausible=True).any()


def test_gradual_fall_below_chance_is_trusted() -> None:
    # As in modular polynomials: from chance to zero during memorisation, then up.
    dip = np.clip(np.interp(STEPS, [0, 40, 60, 300, 340, 5000], [0.04, 0.004, 0, 0, 0.004, 0.004]), 0, 1)
    late = rise(900, 20, low=0.0)
    test = np.where(STEPS <= 340, np.rint(dip * SIZE) / SIZE, late)
    assert ((STEPS > 60) & (test == 0)).sum() > 20
    assert evaluated(fitted(), test).verdict is GrokkingVerdict.GROKKING
    jumps = np.where((STEPS > 100) & (STEPS < 600), 0.0, rise(900, 20))  # from chance to 0 at once
    assert evaluated(fitted(), jumps).verdict is GrokkingVerdict.INSUFFICIENT_DATA


def test_recoveries_from_instability_are_not_grokking() -> None:
    crash = (STEPS > 400) & (STEPS < 900)
    both = np.where(crash, CHANCE, 1.0) * fitted()
    assert evaluated(both, np.where(crash, CHANCE, rise(30, 4))).verdict is not GrokkingVerdict.GROKKING
    # Half way at once, lost, and back late, while the training accuracy comes back at once.
    early = rise(30, 4, high=0.8)
    test = np.where(STEPS < 200, early, rise(1500, 30, seed=3))
    found = evaluated(fitted(), test)
    assert found.verdict is GrokkingVerdict.UNSTABLE
    assert "a recovery or double descent, not grokking" in found.claim


def test_verdict_that_depends_on_thresholds_is_artefact() -> None:
    # To .93 at once, the rest late: at 90 % of the way there is no delay.
    test = np.where(STEPS < 1200, np.where(STEPS < 100, 0.2, 0.93), 0.999)
    test = np.where((STEPS < 90), 0.2 + STEPS / 1e4, test)
    train = fitted()
    found = evaluated(train, test, limits=VerdictLimits(sweep_test_low=0.9, test_share_memorised=0.6))
    assert found.verdict is GrokkingVerdict.THRESHOLD_ARTEFACT
    assert not all(point.grokking for point in found.sweep)
    assert any(point.grokking for point in found.sweep)


def test_too_few_logs_or_samples_are_insufficient() -> None:
    rows = np.unique(np.concatenate([np.arange(0, 6), np.arange(6, 501, 45)]))
    found = evaluated(fitted()[rows], rise(900, 20)[rows], STEPS[rows])
    assert found.verdict is GrokkingVerdict.INSUFFICIENT_DATA
    assert found.claim.startswith(("There are fewer than 10 logs", "The logs are too far apart"))
    small = evaluated(fitted(), np.rint(rise(900, 20) * 8) / 8, test_size=8)
    assert small.verdict is GrokkingVerdict.INSUFFICIENT_DATA
    assert "test set is too small" in small.claim
    few = evaluated(fitted()[:3], rise(900, 20)[:3], STEPS[:3])
    assert few.verdict is GrokkingVerdict.INSUFFICIENT_DATA


def test_unknown_test_size_is_bounded_by_values() -> None:
    found = evaluated(fitted(), rise(900, 20), test_size=None)
    assert not found.test_size_known
    assert found.test_size == len(np.unique(rise(900, 20))) - 1 <= SIZE
    assert any("different accuracies" in note for note in found.notes)


def test_order_repetition_and_nan_do_not_change_verdict() -> None:
    train, test = fitted(), rise(900, 20)
    clean = evaluated(train, test)
    order = np.random.default_rng(1).permutation(len(STEPS))
    mixed = evaluated(train[order], test[order], STEPS[order])
    assert mixed.notes == tuple(f"{n}: the logs were not in the order of their steps and were sorted"
                                for n in ("train accuracy", "test accuracy"))  # fmt: skip
    doubled = evaluated(np.repeat(train, 2), np.repeat(test, 2), np.repeat(STEPS, 2))
    gaps = test.copy()
    gaps[[3, 300, 400]] = np.nan
    with_gaps = evaluated(train, gaps)
    assert "3 of 501 logs are NaN" in " ".join(with_gaps.notes)
    for other in (mixed, doubled, with_gaps):
        assert (other.verdict, other.memorised, other.generalised) == (
            clean.verdict, clean.memorised, clean.generalised,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"test": rise(900, 20) * 100}, "test accuracy: .* is not a share of samples.*not as percentages"),
        ({"test": np.full(len(STEPS), np.nan)}, "no test accuracy was logged.*watch.log"),
        ({"train": np.where(STEPS == 50, -0.5, 1.0)}, "train accuracy: -0.5 at step 50 is not a share"),
        ({"train": np.where(STEPS == 50, np.inf, 1.0)}, "train accuracy: inf at step 50 is not a share"),
        ({"train": np.ones(3)}, "got steps of shape .501,. and values of shape .3,."),
        ({"chance": 1.5}, "0 <= chance < 1; got 1.5"),
        ({"test_size": 0}, "test_size counts samples and must be at least 1; got 0"),
    ],
)
def test_invalid_curves_are_refused(change: dict[str, object], text: str) -> None:
    train = np.asarray(change.pop("train", fitted()))
    test = np.asarray(change.pop("test", rise(900, 20)))
    with pytest.raises(DetectionError, match=text):
        evaluated(train, test, **change)


def test_wilson_equals_textbook_interval() -> None:
    from scipy.stats import binomtest

    for share, size in ((1.0, 20), (0.5, 40), (0.0, 10), (0.97, 265)):
        hits = round(share * size)
        expected = binomtest(hits, size).proportion_ci(method="wilson")
        assert curves.wilson(hits / size, size) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.integers(0, 100),
)
def test_verdict_of_any_curve(train: list[float], test: list[float], start: int) -> None:
    found = detect(
        np.arange(len(train)) + start, train, np.arange(len(test)) + start, test, chance=0.1, test_size=100
    )
    if found.verdict is GrokkingVerdict.GROKKING:
        assert all(condition.held for condition in found.conditions)
    for interval in (found.memorised, found.generalised):
        assert interval is None or interval.after <= interval.by
    assert found.ratio is None or found.ratio[0] >= 0
