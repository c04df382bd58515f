"""Sampling of recorded steps."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

import backlight
from backlight import clock
from backlight.session.sampling import BUDGET, FIRST_S, FIRST_STEPS, ProcessorTime, Sampling


def simulate(sampling: Sampling, steps: int, step_seconds: float, cost: float) -> list[int]:
    """Return the recorded steps of a run in which recording a step costs ``cost`` seconds."""
    recorded, spent = [], 0.0
    for step in range(steps):
        sampling.review(step, spent, step * step_seconds, spent)
        if sampling.wants(step):
            recorded.append(step)
            spent += cost
    return recorded


def test_short_run_records_every_step() -> None:
    assert len(simulate(Sampling(), 100, 0.001, 0.001)) == 100


@pytest.mark.parametrize("step_seconds", [0.0001, 0.001, 0.1])
def test_first_steps_of_a_small_model_are_recorded_whole(step_seconds: float) -> None:
    recorded = simulate(Sampling(), 10 * FIRST_STEPS, step_seconds, 0.99 * FIRST_S / FIRST_STEPS)
    assert recorded[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert len(recorded) < 1.5 * FIRST_STEPS or step_seconds == 0.1


@pytest.mark.parametrize("cost", [0.005, 0.02, 0.3])
def test_first_steps_that_are_dear_are_thinned(cost: float) -> None:
    recorded = simulate(Sampling(), FIRST_STEPS, 10 * cost, cost)
    assert recorded[:8] == list(range(8))
    assert len(recorded) <= 8 + max(FIRST_S / cost, FIRST_STEPS / 16)
    whole = simulate(Sampling(), FIRST_STEPS, 1.01 * cost / BUDGET, cost)  # within the budget nothing is dear
    assert len(whole) == FIRST_STEPS


def test_cost_of_the_first_step_alone_thins_nothing() -> None:
    sampling = Sampling()
    for step in range(FIRST_STEPS):
        spent = 5.0 * (step > 0) + 0.001 * step
        sampling.review(step, spent, 0.002 * step, spent)
    assert sampling.spacing == 1


def test_threads_that_work_once_near_the_start_thin_no_first_step() -> None:
    sampling = Sampling()
    for step in range(FIRST_STEPS):
        sampling.review(step, 0.001 * step + 2.0 * (step > 5), 0.005 * step, 0.001 * step)
    assert sampling.spacing == 1


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


@pytest.mark.slow
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


def test_rounds_are_recorded_whole() -> None:
    sampling = Sampling(every=3, turns=2)
    wanted = [step for step in range(30) if sampling.wants(step)]
    assert wanted == [0, 1, 6, 7, 12, 13, 18, 19, 24, 25]
    assert [sampling.next(step) for step in wanted[:-1]] == wanted[1:]
    assert sampling.next(2) == 6


def test_detail_records_every_step_of_its_window() -> None:
    sampling = Sampling(every=10)
    sampling.detail(11, 3)
    assert [s for s in range(31) if sampling.wants(s)] == [*range(0, 15), 20, 30]


def test_zero_spacing_is_rejected() -> None:
    with pytest.raises(ValueError, match="every=0: expected a step count of 1 or more"):
        Sampling(every=0)


def test_time_of_the_thread_that_trains_goes_on_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5.0, 5.5, 100.0, 100.25])
    monkeypatch.setattr(clock, "thread_time", lambda: next(readings))
    time, found = ProcessorTime(), []
    found += [time.elapsed(), time.elapsed()]
    thread = threading.Thread(target=lambda: found.extend([time.elapsed(), time.elapsed()]))
    thread.start()
    thread.join()
    assert found == [0.0, 0.5, 0.5, 0.75]


def recorded_steps(path: Path, monkeypatch: pytest.MonkeyPatch, delay: float) -> list[int]:
    """Train with clocks of the test: 0.1 ms of the processor between two readings of the training thread.

    Of ``delay`` seconds between two readings of the wall clock the thread has no processor.
    """
    main, seconds = threading.get_ident(), {"processor": 0.0, "wall": 0.0}

    def processor() -> float:
        if threading.get_ident() != main:
            return 0.0
        seconds["processor"] += 1e-4
        return seconds["processor"]

    def wall() -> float:
        seconds["wall"] += 1e-4 + delay
        return seconds["wall"]

    monkeypatch.setattr(clock, "thread_time", processor)
    monkeypatch.setattr(clock, "perf_counter", wall)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with backlight.watch(model, optimizer, run=path, monitors="health", summary=False):
        for _ in range(400):
            seconds["processor"] += 1e-4
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    return list(backlight.open_run(path).series_steps("gradient"))


@pytest.mark.slow
def test_busy_machine_changes_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same processor time, at 1,000 times the wall time."""
    idle = recorded_steps(tmp_path / "idle", monkeypatch, 0.0)
    busy = recorded_steps(tmp_path / "busy", monkeypatch, 0.1)
    assert idle == busy
    assert FIRST_STEPS <= len(idle) < 200  # the budget binds
