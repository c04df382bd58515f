"""Sampling of recorded steps."""

from __future__ import annotations

import itertools

import pytest

from backlight.session.sampling import BUDGET, FIRST_STEPS, Sampling


def simulate(sampling: Sampling, steps: int, step_seconds: float, cost: float) -> list[int]:
    """Return the recorded steps of a run in which recording a step costs ``cost`` seconds."""
    recorded, spent = [], 0.0
    for step in range(steps):
        sampling.review(step, spent, step * step_seconds)
        if sampling.wants(step):
            recorded.append(step)
            spent += cost
    return recorded


def test_short_run_records_every_step() -> None:
    assert len(simulate(Sampling(), 100, 0.001, 0.001)) == 100


def test_first_steps_are_recorded_whatever_they_cost() -> None:
    recorded = simulate(Sampling(), 10 * FIRST_STEPS, 0.001, 1.0)
    assert recorded[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert len(recorded) < 1.5 * FIRST_STEPS


def cost_share(steps: int, step_seconds: float, cost: float) -> float:
    return cost * len(simulate(Sampling(), steps, step_seconds, cost)) / (steps * step_seconds)


@pytest.mark.parametrize("step_seconds", [0.0003, 0.001, 0.01, 0.1])
def test_run_of_two_minutes_costs_the_budget_its_first_steps_included(step_seconds: float) -> None:
    assert cost_share(round(120 / step_seconds), step_seconds, 0.0015) <= 1.1 * BUDGET


def test_first_steps_find_the_spacing() -> None:
    recorded = simulate(Sampling(), 20_000, 0.0003, 0.0015)
    assert len(recorded) <= 2 * FIRST_STEPS


def test_cheap_measurement_records_every_step() -> None:
    assert len(simulate(Sampling(), 20_000, 0.1, 0.0009)) == 20_000


def test_expensive_measurement_is_thinned_to_the_budget() -> None:
    steps = 200_000
    recorded = simulate(Sampling(), steps, 0.001, 0.001)
    assert 0.003 < len(recorded) / steps < 0.025
    late = [s for s in recorded if s > steps // 2]
    gaps = {b - a for a, b in itertools.pairwise(late)}
    assert all(gap & (gap - 1) == 0 for gap in gaps), "the recorded steps left the grid of powers of two"


def test_fixed_spacing_is_kept() -> None:
    sampling = Sampling(every=7)
    assert simulate(sampling, 100, 0.001, 10.0) == list(range(0, 100, 7))


def test_detail_records_every_step_of_its_window() -> None:
    sampling = Sampling(every=10)
    sampling.detail(11, 3)
    assert [s for s in range(31) if sampling.wants(s)] == [*range(0, 15), 20, 30]


def test_zero_spacing_is_rejected() -> None:
    with pytest.raises(ValueError, match="every=0: expected a step count of 1 or more"):
        Sampling(every=0)
