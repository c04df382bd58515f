"""Comparison of step times: injected slowdowns are found in their phase, controls do not differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backlight.monitors.steptime.model.step_comparison import (
    compare_pairs,
    compare_steady,
    compare_times,
    medians,
)
from backlight.monitors.steptime.model.step_times import PhaseTimes, read_phases
from backlight.store.read.run import Run
from run_builder import build_steptime_run

PHASES = {"data": 0.004, "backward": 0.03, "optimizer": 0.006, "between": 0.01}


def write(path: Path, seed: int, steps: int = 120, *, core_wait: float = 0.0, **factors: float) -> Run:
    levels = {name: level * factors.get(name, 1.0) for name, level in PHASES.items()}
    cold = {(0, name): 20 * level for name, level in levels.items()}
    info = {"core_wait": core_wait} if core_wait else None
    return build_steptime_run(path, levels, steps=steps, changes=cold, runtime_info=info, seed=seed)


def test_phases_add_up_and_warmup_is_cut(tmp_path: Path) -> None:
    table = read_phases(write(tmp_path / "run", 0))
    assert table is not None
    assert set(table.names) == set(PHASES)
    np.testing.assert_allclose(table.total, table.seconds.sum(axis=1))
    steady, rest = table.steady()
    assert steady.warmup == 1
    assert len(rest.steps) == 119
    assert np.median(rest.total) == pytest.approx(0.05, rel=0.01)
    assert not table.phase("clip").any()


def test_slower_backward_is_found_in_its_phase(tmp_path: Path) -> None:
    found = compare_times(write(tmp_path / "a", 0), write(tmp_path / "b", 1, backward=1.1))
    rows = {row.name: row for row in found.rows}
    assert found.rows[0].name == "step"
    assert rows["step"].low <= 1.06 <= rows["step"].high
    assert rows["backward"].low <= 1.1 <= rows["backward"].high
    assert [name for name, row in rows.items() if row.is_significant] == ["step", "backward"]
    assert all(row.ratio == pytest.approx(row.second_ms / row.first_ms) for row in found.rows)
    assert {row.verdict for row in found.rows if not row.is_significant} == {"undecided"}
    assert found.verdict.startswith("Step time: B is slower than A. B÷A is 1.0")


@pytest.mark.slow
def test_repeats_replace_the_assumed_variation(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1, backward=1.05)
    assumed = compare_times(a, b)
    assert not assumed.rows[0].is_significant
    assert "assumed to vary by 1.25 %" in assumed.basis
    repeats = [found for seed in range(2, 6) if (found := medians(write(tmp_path / f"{seed}", seed)))]
    measured = compare_times(a, b, [repeats])
    assert measured.rows[0].is_significant  # of equal speed, they differ by less than is assumed
    assert measured.basis.endswith("measured over 4 runs")
    varying = [{name: by * value for name, value in repeats[0].items()} for by in (0.9, 1.0, 1.1)]
    assert not compare_times(a, b, [varying]).rows[0].is_significant


@pytest.mark.slow
def test_equal_runs_that_vary_by_one_percent_seldom_differ() -> None:
    random = np.random.default_rng(0)

    def run(slower: float = 1.0) -> PhaseTimes:
        steps = np.exp(random.normal(0, 0.02, (60, len(PHASES)))) * [*PHASES.values()]
        return PhaseTimes(np.arange(60), tuple(PHASES), steps * slower * np.exp(random.normal(0, 0.01)))

    equal = [compare_steady(run(), run()).rows for _ in range(400)]
    assert np.mean([any(row.is_significant for row in rows) for rows in equal]) <= 0.05
    assert all(compare_steady(run(), run(1.08)).rows[0].is_significant for _ in range(50))


def test_ratio_of_pairs_is_that_of_their_times() -> None:
    found = compare_pairs(
        [{"step": 1.0}, {"step": 2.0}, {"step": 4.0}], [{"step": s} for s in (2.0, 2.0, 5.0)]
    )
    (row,) = found.rows
    assert row.ratio == pytest.approx(row.second_ms / row.first_ms)


@pytest.mark.slow
def test_controls_do_not_differ(tmp_path: Path) -> None:
    pairs = [
        compare_times(
            write(tmp_path / f"{s}-a", 2 * s, steps=40), write(tmp_path / f"{s}-b", 2 * s + 1, steps=40)
        )
        for s in range(8)
    ]
    assert not any(row.is_significant for pair in pairs for row in pair.rows)


@pytest.mark.slow
def test_differences_within_core_waits_are_not_claimed(tmp_path: Path) -> None:
    calm = write(tmp_path / "a", 0)
    busy = compare_times(calm, write(tmp_path / "b", 1, core_wait=0.06, backward=1.1))
    assert not busy.rows[0].is_significant
    assert busy.rows[0].low <= 1.0
    assert busy.rows[0].high >= 1.06
    assert "B: its thread waited for a core 6% of the time" in busy.trouble[0]
    # A larger difference is found, and so is one against a faster run that waited.
    assert compare_times(calm, write(tmp_path / "c", 1, core_wait=0.06, backward=1.5)).rows[0].is_significant
    waited, slower = write(tmp_path / "d", 1, core_wait=0.06), write(tmp_path / "e", 1, backward=1.1)
    assert compare_times(waited, slower).rows[0].is_significant


def test_drifting_run_has_no_difference(tmp_path: Path) -> None:
    changes = {(step, "other"): 0.05 for step in range(40)}
    drifting = build_steptime_run(tmp_path / "drift", {"other": 0.08}, steps=80, changes=changes)
    found = compare_times(write(tmp_path / "a", 0, between=0.2), drifting)
    assert not any(row.is_significant for row in found.rows)
    assert found.rows[0].verdict == "undecided: steps drift"
    assert "drift" in found.trouble[0]


def test_missing_or_negligible_phase_is_not_tested(tmp_path: Path) -> None:
    found = compare_times(write(tmp_path / "a", 0, data=0.0), write(tmp_path / "b", 1, optimizer=1e-4))
    rows = {row.name: row for row in found.rows}
    assert rows["data"].verdict == "not in both"
    assert rows["optimizer"].verdict == "too short to test"


def test_too_few_steps_give_a_reason(tmp_path: Path) -> None:
    found = compare_times(write(tmp_path / "a", 0), write(tmp_path / "b", 1, steps=6))
    assert found.rows == ()
    assert found.verdict.startswith("Step times are not compared: B: 6 steps are too few")
