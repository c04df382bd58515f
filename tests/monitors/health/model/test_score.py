from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.monitors.health.model.score import (
    ScoreLimits,
    exploding,
    health,
    health_series,
    total_norms,
    vanishing,
)

LIMITS = ScoreLimits()
YES = np.ones(4, dtype=bool)


def test_vanishing_needs_both_limits() -> None:
    rms = np.array([1e-9, 1e-7, 1e-3, 1e-3])
    assert vanishing(rms, YES, LIMITS).tolist() == [True, False, False, False]
    assert not vanishing(rms * 1e-6, YES, LIMITS)[1:].any()  # far below 1e-8, but like the others
    assert vanishing(rms * 1e-6, YES, LIMITS)[0]
    assert not vanishing(np.full(4, 1e-12), YES, LIMITS).any()


def test_exact_zeros_always_vanish() -> None:
    assert vanishing(np.array([0.0, 0.0, 0.0, 1e-3]), YES, LIMITS).tolist() == [True, True, True, False]
    assert vanishing(np.zeros(4), YES, LIMITS).all()


def test_unmeasured_parameters_are_ignored() -> None:
    rms = np.array([0.0, np.nan, 1e-3, 1e-3])
    measured = np.array([False, False, True, True])
    assert not vanishing(rms, measured, LIMITS).any()
    assert not exploding(rms * 1e9, measured, np.full(4, np.nan), LIMITS).any()


def test_exploding_is_relative_to_its_own_median() -> None:
    rms = np.array([2e3, 5e2, 1.0, 5e-9])
    medians = np.array([1.0, 1.0, 0.0, 1e-15])
    assert exploding(rms, YES, medians, LIMITS).tolist() == [True, False, False, False]
    unknown = np.full(4, np.nan)
    assert not exploding(rms, YES, unknown, LIMITS).any()


def test_total_norm_above_the_clip_norm_marks_the_step() -> None:
    rms, measured = np.ones((2, 3)), np.array([[True, True, False]] * 2)
    marks = exploding(
        rms, measured, rms, LIMITS, total_norm=np.array([9.0, 11.0]), clip_norm=np.array([1.0, 1.0])
    )
    assert marks.tolist() == [[False] * 3, [True, True, False]]
    assert not exploding(rms, measured, rms, LIMITS, total_norm=np.array([1e9, 1e9])).any()


def test_health_follows_the_documented_formula() -> None:
    def score_of(vanishes: int, explodes: int, finite: bool = True, measured: int = 4) -> float:
        marks = [np.arange(4) < n for n in (measured, vanishes, explodes)]
        return float(health(*marks, finite, LIMITS))

    assert score_of(0, 0) == 1.0
    assert score_of(2, 0) == 0.75
    assert score_of(0, 2) == pytest.approx(0.6)
    assert score_of(1, 2) == pytest.approx(1 - 0.125 - 0.4)
    assert score_of(4, 4) == 0.0
    assert score_of(0, 0, finite=False) == 0.0
    assert np.isnan(score_of(0, 0, measured=0))
    assert np.isnan(score_of(0, 0, finite=False, measured=0))


@pytest.mark.slow
@given(
    st.lists(st.floats(0, 1e30), min_size=1, max_size=30),
    st.floats(1e-3, 1e3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_health_is_order_invariant_and_between_0_and_1(
    values: list[float], median: float, random: Any
) -> None:
    rms = np.array(values)
    order = list(range(len(values)))
    random.shuffle(order)

    def score(row: np.ndarray) -> float:
        all_ = np.ones(len(row), dtype=bool)
        explodes = exploding(row, all_, np.full(len(row), median), LIMITS)
        return float(health(all_, vanishing(row, all_, LIMITS), explodes, True, LIMITS))

    assert 0.0 <= score(rms) <= 1.0
    assert score(rms) == pytest.approx(score(rms[order]))


def test_health_series_of_a_run(synthetic: Any) -> None:
    rms = {
        "a": [1e-2] * 30,
        "b": [1e-2] * 10 + [0.0] * 10 + [1e-2] * 10,
        "c": [1e-2] * 25 + [1e3] * 2 + [1e-2] * 3,
        "d": [float("nan")] * 30,
    }
    for series in rms.values():
        series[5] = float("nan")
    run = synthetic(rms, nan={("a", 28): 2})
    scored = health_series(run)
    assert scored.steps.tolist() == list(range(30))
    assert np.isnan(scored.score[5])
    assert scored.score[0] == 1.0
    assert scored.score[15] == pytest.approx(1 - 0.5 / 3)
    assert scored.score[25] == pytest.approx(1 - 0.8 / 3)
    assert scored.score[28] == 0.0
    assert scored.measured[[0, 5]].tolist() == [3, 0]
    assert (scored.vanishing[15], scored.exploding[25], scored.non_finite[28]) == (1, 1, 1)


def test_health_series_uses_recorded_overrides(synthetic: Any) -> None:
    rms = {"a": [1e-2] * 10, "b": [0.0] * 10}
    run = synthetic(rms, overrides={"health": {"penalty_vanishing": 1.0}})
    assert health_series(run).score[0] == 0.5
    assert health_series(run, LIMITS).score[0] == 0.75
    of_the_future = {"penalty_lost": 1.0, "penalty_vanishing": 1.0}
    assert health_series(synthetic(rms, overrides={"health": of_the_future})).score[0] == 0.5


def test_run_without_gradients_has_no_health(synthetic: Any) -> None:
    assert len(health_series(synthetic({})).score) == 0


def test_total_norms_are_recorded_or_computed(synthetic: Any) -> None:
    rms = {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, float("nan")]}
    run = synthetic(rms, scalars={"total_norm": {1: 99.0}})
    norms = total_norms(run, np.arange(3))
    assert norms[0] == pytest.approx(np.sqrt(64 + 4 * 64))
    assert norms[1] == 99.0
    assert np.isnan(norms[2])  # a part of the parameters is not the total
