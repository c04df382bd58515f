"""Correlations with the test accuracy: leads, lags, and the comparison with the control."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from backlight.monitors.grokking.model.analysis import analyse, analyse_if_possible
from backlight.monitors.grokking.model.curves import change_points
from backlight.monitors.grokking.model.lead_lag import (
    FOLLOWS,
    MIN_LOGS,
    LeadLag,
    false_discoveries,
    lead_lags,
    needed_of_each,
    permutation_p,
    rank_correlation,
    slopes,
    smallest_p,
)
from backlight.monitors.grokking.model.reader import detect_run, seeds_of
from backlight.store.read.run import Run
from grokking_runs import Grok, sigmoid, write_grokking_run, write_scalars


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    root = tmp_path_factory.mktemp("pair")
    run = write_grokking_run(root / "run", Grok())
    plan = Grok(control="random-labels", control_of=run.run_id, seed=3)
    return run, write_grokking_run(root / "control", plan)


def test_rank_correlation_equals_scipy() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        one, other = draw.integers(0, 6, 30).astype(float), draw.normal(size=30)
        assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)
    assert rank_correlation(np.ones(9), np.arange(9.0)) is None


@pytest.mark.slow
def test_measure_that_control_follows_is_no_signal(pair: tuple[Run, Run]) -> None:
    run, control = pair
    rows = {row.measure: row for row in lead_lags(run, detect_run(run), [control])}
    assert rows["progress/fourier_ipr"].levels[0] > 3 * rows["progress/fourier_ipr"].levels[1]
    norm = rows["progress/weight_norm"]
    assert norm.correlation < -0.8
    assert norm.control == pytest.approx(1, abs=0.05)
    assert abs(rows["progress/fourier_ipr"].control) < 0.1
    assert rows["gram/model/numerical_rank"].conclusion == "does not move"
    # One of each can show nothing: the smallest p-value is 1.
    strong = {row.conclusion for row in rows.values() if abs(row.correlation or 0) >= 0.7}
    assert strong == {"no conclusion: too few runs and controls"}
    ordered = [abs(row.correlation or 0) for row in rows.values()]
    assert ordered == sorted(ordered, reverse=True)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Run], list[Run]]:
    """Six seeds of a run, and twelve controls."""
    root, runs, controls = tmp_path_factory.mktemp("group"), [], []
    for seed in range(6):
        plan = Grok(generalises=900 + 20 * seed, seed=seed)
        runs.append(write_grokking_run(root / f"run-{seed}", plan))
    for seed in range(12):
        plan = Grok(control="random-labels", control_of=f"run-{seed % 6}", seed=seed)
        controls.append(write_grokking_run(root / f"control-{seed}", plan))
    return runs, controls


@pytest.mark.slow
def test_enough_controls_find_what_they_do_not_show(group: tuple[list[Run], list[Run]]) -> None:
    runs, controls = group
    found = analyse_if_possible(runs[0])
    assert (len(found.seeds), len(found.controls)) == (5, 12)
    assert found.control_detection.verdict == "memorised"
    rows = {row.measure: row for row in found.following}
    for name in ("progress/fourier_ipr", "agop/circulant_deviation", "window/explained_1"):
        assert (rows[name].conclusion, rows[name].q <= 0.05) == (FOLLOWS, True)
        assert rows[name].runs == (6, 12)
    for name in ("progress/weight_norm", "agop/trace", "gradient/norm"):
        assert rows[name].conclusion == "not distinguished from the controls"
        assert rows[name].q > 0.05
    assert "progress/fourier_ipr" in found.signals()
    # Three of each are too few, and how many are needed is stated.
    few = analyse(runs[0], [*runs[:3], *controls[:3]])
    assert {row.conclusion for row in few.following} & {FOLLOWS} == set()
    assert f"{few.needed} seeds of each" in few.signals()


@pytest.mark.slow
def test_measure_that_moves_with_controls_as_well_is_no_signal(tmp_path: Path) -> None:
    # Controls move .8 as far, with little noise: a difference, but no signal.
    steps = np.arange(0, 2001, 20)
    rise, draw = sigmoid(steps, 900, 30), np.random.default_rng(0)

    def write(name: str, share: float, seed: int) -> Run:
        moved = share * rise + draw.normal(0, 0.02, len(steps))
        logs = [
            (step, {"train_accuracy": 1.0 if step > 30 else 0.1, "test_accuracy": a, "progress/one": b})
            for step, a, b in zip(steps.tolist(), rise.tolist(), moved.tolist(), strict=True)
        ]
        return write_scalars(tmp_path / f"{name}-{seed}", *logs)

    for share, conclusion in ((0.8, "the controls follow as well"), (0.3, FOLLOWS)):
        runs = [write(f"run-{share}", 1.0, seed) for seed in range(5)]
        controls = [write(f"control-{share}", share, seed) for seed in range(5)]
        (row,) = lead_lags(runs[0], detect_run(runs[0]), controls, runs[1:])
        assert (row.conclusion, row.q <= 0.05) == (conclusion, True)
        assert row.control == pytest.approx(share, abs=0.05)


@pytest.mark.slow
def test_control_against_control_makes_no_claim(group: tuple[list[Run], list[Run]]) -> None:
    _, controls = group
    draw, false = np.random.default_rng(0), 0
    for _ in range(20):
        order = draw.permutation(12)
        picked = [controls[row] for row in order]
        rows = lead_lags(picked[0], detect_run(picked[0]), picked[6:], picked[1:6])
        false += any(row.conclusion == FOLLOWS for row in rows)
    assert false <= 3  # of 20 at a rate of .05: more has a probability of .016


@pytest.mark.slow
def test_p_values_of_exchangeable_curves_are_uniform() -> None:
    draw = np.random.default_rng(1)
    reference = np.maximum.accumulate(draw.normal(size=40))
    for runs, controls in ((4, 5), (5, 5), (2, 8)):
        p = [
            permutation_p(slopes(draw.normal(size=(runs + controls, 40)).cumsum(1), reference, 8), runs)
            for _ in range(400)
        ]
        for level in (0.05, 0.2, 0.5):
            assert np.mean(np.array(p) <= level) <= level + 3 * np.sqrt(level * (1 - level) / 400)
        assert min(p) >= smallest_p(runs, controls) - 1e-12


def test_smallest_p_value_and_what_is_needed() -> None:
    apart = np.concatenate([np.ones((4, 3)), np.zeros((5, 3))]) + np.random.default_rng(0).normal(
        0, 0.01, (9, 3)
    )
    assert permutation_p(apart, 4) == pytest.approx(smallest_p(4, 5)) == pytest.approx(1 / 126)
    assert smallest_p(1, 1) == smallest_p(0, 9) == 1
    assert [needed_of_each(m, 0.05) for m in (1, 20, 100)] == [4, 6, 8]
    assert false_discoveries([0.001, 0.02, 0.5]) == pytest.approx([0.003, 0.03, 0.5])
    assert false_discoveries([]) == []


@pytest.mark.slow
def test_seeds_must_have_been_trained_alike(tmp_path: Path) -> None:
    run = write_grokking_run(tmp_path / "a", Grok(seed=0))
    same = write_grokking_run(tmp_path / "b", Grok(seed=1))
    again = write_grokking_run(tmp_path / "c", Grok(seed=0))
    control = write_grokking_run(tmp_path / "d", Grok(seed=2, control="random-labels"))
    other = write_grokking_run(tmp_path / "e", Grok(seed=4, decay=0.5))
    assert [found.path for found in seeds_of(run, [again, same, control, other])] == [same.path]


@pytest.mark.slow
def test_no_conclusion_without_control(pair: tuple[Run, Run]) -> None:
    run, _ = pair
    strong = [row for row in lead_lags(run, detect_run(run)) if abs(row.correlation or 0) >= 0.7]
    assert strong
    assert {row.conclusion for row in strong} == {"no conclusion: no control measured it"}


def rows_of(run: Run) -> dict[str, LeadLag]:
    return {row.measure: row for row in lead_lags(run, detect_run(run))}


@pytest.mark.parametrize(("lead", "found"), [(120, 120), (-60, -60), (0, 0)])
def test_earlier_rise_leads(tmp_path: Path, lead: int, found: int) -> None:
    steps = np.arange(0, 2001, 10)
    test, one = sigmoid(steps, 900, 30), sigmoid(steps, 900 - lead, 30)
    logs = [
        (step, {"train_accuracy": 1.0 if step > 30 else 0.1, "test_accuracy": a, "progress/one": b})
        for step, a, b in zip(steps.tolist(), test.tolist(), one.tolist(), strict=True)
    ]
    row = rows_of(write_scalars(tmp_path / "run", *logs))["progress/one"]
    assert (row.lead_steps, row.correlation > 0.95) == (found, True)


def test_earlier_peak_leads(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    wave = np.convolve(draw.normal(size=121), np.ones(9) / 9, "same")
    test = np.clip(0.5 + wave / 2, 0, 1)
    logs = [
        (10 * row, {"train_accuracy": 1.0, "test_accuracy": float(test[row]),
                    "progress/early": float(wave[row + 6]), "progress/late": float(-wave[max(0, row - 4)])})
        for row in range(101)
    ]  # fmt: skip
    rows = rows_of(write_scalars(tmp_path / "run", *logs))
    assert rows["progress/early"].lead_steps == 60
    assert rows["progress/late"].lead_steps == -40
    assert rows["progress/late"].correlation < -0.95


def test_too_few_common_logs_give_no_correlation(tmp_path: Path) -> None:
    run = write_grokking_run(tmp_path / "run", Grok(steps=300))
    rows = lead_lags(run, detect_run(run))
    assert all(row.logs < MIN_LOGS for row in rows)
    assert {row.conclusion for row in rows} == {"too few common logs"}


@pytest.mark.slow
def test_change_points_are_where_level_changes() -> None:
    draw = np.random.default_rng(0)
    steps = np.arange(0, 1000, 10)
    values = np.where(steps < 400, 0.1, 0.9) + draw.normal(0, 0.01, len(steps))
    assert change_points(steps, values) == (400,)
    assert change_points(steps, np.full(len(steps), 0.3)) == ()
    assert change_points(steps, 0.3 + draw.normal(0, 0.01, len(steps))) == ()


def test_change_points_are_none_without_ruptures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    assert change_points(np.arange(50), np.arange(50.0)) is None


@pytest.mark.slow
def test_examine_finds_control_next_to_run(pair: tuple[Run, Run]) -> None:
    run, control = pair
    found = analyse_if_possible(run)
    assert found.control.run_id == control.run_id
    assert found.control_detection.verdict == "memorised"
    plain = analyse(run).as_json()
    assert plain["control"] is None
    assert plain["verdict"] == "grokking"
    assert plain["generalised"]["by"] == found.detection.generalised.by
