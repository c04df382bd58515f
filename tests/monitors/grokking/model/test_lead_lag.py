"""Correlations with the test accuracy: leads, lags, and the comparison with the control."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from backlight.monitors.grokking.model.analysis import analyse, analyse_if_possible
from backlight.monitors.grokking.model.curves import change_points
from backlight.monitors.grokking.model.lead_lag import MIN_LOGS, LeadLag, lead_lags, rank_correlation
from backlight.monitors.grokking.model.reader import detect_run
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


def test_measure_that_control_follows_is_no_signal(pair: tuple[Run, Run]) -> None:
    run, control = pair
    rows = {row.measure: row for row in lead_lags(run, detect_run(run), control)}
    assert rows["progress/fourier_ipr"].conclusion == "follows, and the control does not"
    assert rows["progress/fourier_ipr"].levels_differ
    norm = rows["progress/weight_norm"]
    assert norm.correlation < -0.8
    assert norm.control == pytest.approx(norm.correlation, abs=0.05)
    assert norm.conclusion == "the control shows the same"
    assert rows["agop/trace"].conclusion == "the control shows the same"
    assert rows["gram/model/numerical_rank"].conclusion == "does not move"
    ordered = [abs(row.correlation or 0) for row in lead_lags(run, detect_run(run), control)]
    assert ordered == sorted(ordered, reverse=True)


def test_no_conclusion_without_control(pair: tuple[Run, Run]) -> None:
    run, _ = pair
    strong = [row for row in lead_lags(run, detect_run(run)) if abs(row.correlation or 0) >= 0.7]
    assert strong
    assert {row.conclusion for row in strong} == {"no conclusion: there is no matched control"}


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


def test_examine_finds_control_next_to_run(pair: tuple[Run, Run]) -> None:
    run, control = pair
    found = analyse_if_possible(run)
    assert found.control.run_id == control.run_id
    assert found.control_detection.verdict == "memorised"
    plain = analyse(run).as_json()
    assert plain["control"] is None
    assert plain["verdict"] == "grokking"
    assert plain["generalised"]["by"] == found.detection.generalised.by
