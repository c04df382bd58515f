"""Rules that read a part of a run first give the result of the whole run, by slow references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backlight.findings.evaluate import evaluate_rules
from backlight.findings.limits import merge_overrides, with_overrides
from backlight.monitors.health.model import history, score
from backlight.monitors.health.model.history import (
    ending,
    ending_share,
    ending_streaks,
    finite_median,
    medians_outrun,
)
from backlight.monitors.health.model.score import clip_norms, exploding, health, health_series, total_norms
from backlight.monitors.health.rules import large_update, no_gradient, no_update, vanishing
from backlight.store.read.run import Run
from run_builder import build_health_run, parameter

Bools = NDArray[np.bool_]

KINDS = ("plain", "grows", "tiny", "zero", "rare", "bursts", "dies", "wild")


def random_values(draw: np.random.Generator, kind: str, steps: int) -> NDArray[np.float64]:
    """Draw the rms of a parameter over steps: NaN where it was not measured."""
    values = np.exp(draw.normal(0, 0.5, steps)) * 10.0 ** draw.uniform(-4, 0)
    at = int(draw.integers(0, steps))
    if kind == "grows":
        values *= np.exp(np.linspace(0, draw.uniform(0, 40), steps))
    elif kind == "tiny":
        values *= 10.0 ** draw.uniform(-12, -5)
    elif kind == "zero":
        values[:] = 0
    elif kind == "rare":
        values[draw.random(steps) < 0.9] = np.nan
    elif kind == "bursts":
        values[at : at + int(draw.integers(1, 9))] *= 1e5
        values[at + 9 :] = np.inf if draw.random() < 0.2 else values[at + 9 :]
    elif kind == "dies":
        values[at:] = draw.choice([0.0, 1e-13])
    elif kind == "wild":
        values = 10.0 ** draw.uniform(-14, 6, steps)
        values[draw.random(steps) < 0.2] = 0
        values[draw.random(steps) < 0.2] = np.nan
    return values


def random_run(path: Path, seed: int) -> Run:
    draw = np.random.default_rng(seed)
    steps = int(draw.choice([4, 40, 150, 500]))
    names = [f"blocks.{i}.weight" for i in range(int(draw.integers(2, 9)))]
    rms = {name: random_values(draw, str(draw.choice(KINDS)), steps) for name in names}
    shares = {n: np.where(v == 0, 1.0, float(draw.choice([0.0, 0.5, 0.95]))) for n, v in rms.items()}
    moved = {n: np.exp(draw.normal(0, 1, steps)) * float(draw.choice([0.0, 1e-3, 3.0])) for n in names}
    for name in names[::2]:
        moved[name][int(draw.integers(0, steps)) :] = 0
    scalars: dict[str, Any] = {"loss": np.exp(draw.normal(0, 1, steps)).tolist()}
    scalars["total_norm"] = {s: float(np.exp(draw.normal(0, 3))) for s in range(steps) if s % 5}
    if seed % 2:
        scalars |= {"clip/norm": [1.0] * steps, "clip/limit": [float(draw.choice([1e-6, 1.0]))] * steps}
    if seed % 3 == 0:
        scalars["scaler/skipped"] = (draw.random(steps) < 0.1).astype(float).tolist()
        scalars["scaler/scale"] = [1024.0] * steps
    return build_health_run(
        path,
        {name: values.tolist() for name, values in rms.items()},
        records={
            n: parameter(n, (8, 8) if i % 3 else (64,), group="" if draw.random() < 0.2 else "0/0")
            for i, n in enumerate(names)
        },
        zeros={n: v.tolist() for n, v in shares.items()},
        nan={(names[0], int(draw.integers(0, steps))): 2} if draw.random() < 0.3 else None,
        update={n: v.tolist() for n, v in moved.items()},
        scalars=scalars,
        sampled=16 if draw.random() < 0.3 else None,
        overrides={"health": {"exploding_factor": float(draw.choice([1.0, 20.0, 1000.0]))}},
    )


def running_median(
    values_SP: NDArray[np.float64], window: int, refresh: int, minimum: int
) -> NDArray[np.float64]:
    """Return the median before each row, by its definition."""
    medians_SP = np.full(values_SP.shape, np.nan)
    for row in range(len(values_SP)):
        known = row if row < refresh else row - row % refresh
        medians_SP[row] = finite_median(values_SP[max(0, known - window) : known].T, minimum)
    return medians_SP


def every_median(
    values_SP: NDArray[np.float64], window: int, refresh: int, minimum: int, factor: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return np.arange(values_SP.shape[1]), running_median(values_SP, window, refresh, minimum)


def reference_streaks(marks: history.Marks, steps: int, columns: int, window: int) -> tuple[Any, Any]:
    hits, measured = marks(slice(0, steps), np.arange(columns))
    lengths = []
    for column in range(columns):
        length = 0
        for row in reversed(range(steps)):
            if measured[row, column]:
                if not hits[row, column]:
                    break
                length += 1
        lengths.append(length)
    return np.array(lengths), measured.any(axis=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    directory = tmp_path_factory.mktemp("runs")
    return [random_run(directory / str(seed), seed) for seed in range(12)]


@pytest.mark.slow
def test_rules_match_a_reference_over_the_whole_run(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    optimised = [list(evaluate_rules(run)) for run in runs]
    expected = {"exploding", "vanishing", "no_gradient", "no_update", "large_update", "non_finite"}
    assert {finding.rule for found in optimised for finding in found} >= expected
    monkeypatch.setattr(score, "medians_outrun", every_median)
    monkeypatch.setattr(vanishing, "ending", lambda measured_SP, window: 0)
    monkeypatch.setattr(vanishing, "CHUNK", 10**9)
    for module in (no_update, no_gradient):
        monkeypatch.setattr(module, "ending_streaks", reference_streaks)
    assert optimised == [list(evaluate_rules(run)) for run in runs]


@pytest.mark.slow
def test_health_series_matches_health_per_step(runs: list[Run]) -> None:
    for run in runs:
        limits = with_overrides(score.ScoreLimits, merge_overrides("health", run.overrides["health"]))
        frame, bad = run.frame("gradient", "rms"), run.frame("gradient", "non_finite")
        rms = np.where(frame.measured, frame.values, np.nan)
        medians = running_median(rms, limits.history_window, limits.history_refresh, limits.history_minimum)
        floors = score.ROUNDING_SHARE * finite_median(np.where(rms > 0, rms, np.nan))
        for row in range(len(rms)):  # a ratio of or to what may be rounding error is left out
            usual = finite_median(floors[max(0, row - limits.history_window) : row])
            medians[row, (medians[row] < usual) | (rms[row] < floors[row])] = np.nan
        vanishes = score.vanishing(rms, frame.measured, limits)
        norms = {"total_norm": total_norms(run, frame.steps), "clip_norm": clip_norms(run, frame.steps)}
        explodes = exploding(rms, frame.measured, medians, limits, **norms)
        non_finite = (bad.values > 0) & frame.measured
        scored = health_series(run)
        expected = health(frame.measured, vanishes, explodes, ~non_finite.any(axis=1), limits)
        np.testing.assert_array_equal(scored.score, expected)
        for count, marks in (
            (scored.measured, frame.measured),
            (scored.vanishing, vanishes),
            (scored.exploding, explodes),
            (scored.non_finite, non_finite),
        ):
            np.testing.assert_array_equal(count, marks.sum(axis=1))


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(0, 90),
    window=st.integers(1, 40),
    refresh=st.integers(1, 17),
    minimum=st.integers(1, 6),
    factor=st.sampled_from([1.0, 2.0, 7.5, 1e3]),
)
@settings(max_examples=80, deadline=None)
def test_every_value_above_its_median_is_kept(
    seed: int, steps: int, window: int, refresh: int, minimum: int, factor: float
) -> None:
    draw = np.random.default_rng(seed)
    values = np.exp(draw.normal(0, draw.choice([0.2, 3.0], 4), (steps, 4)))
    for share, value in ((0.2, np.nan), (0.1, 0.0), (0.05, np.inf)):
        values[draw.random((steps, 4)) < share] = value
    medians = running_median(values, window, refresh, minimum)
    columns, some = medians_outrun(values, window, refresh, minimum, factor)
    above = (medians > 0) & (values > factor * medians)
    np.testing.assert_array_equal(np.setdiff1d(np.flatnonzero(above.any(axis=0)), columns), [])
    known = ~np.isnan(some)
    np.testing.assert_array_equal(some[known], medians[:, columns][known])
    assert not (above[:, columns] & ~known).any()


def test_only_needed_medians_are_computed() -> None:
    values = np.exp(np.random.default_rng(3).normal(0, 0.2, (400, 3)))
    values[300, 1] = 1e6
    columns, medians = medians_outrun(values, 64, 8, 5, 1e3)
    assert columns.tolist() == [1]
    assert np.flatnonzero(~np.isnan(medians[:, 0])).tolist() == list(range(296, 304))


@pytest.mark.slow
@given(seed=st.integers(0, 2**31), steps=st.integers(0, 120), window=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_end_of_the_run_matches_the_whole_run(seed: int, steps: int, window: int) -> None:
    draw = np.random.default_rng(seed)
    measured = draw.random((steps, 5)) < np.array([1.0, 0.9, 0.1, 0.0, draw.random()])
    hits = measured & (draw.random((steps, 5)) < np.array([0.99, 0.9, 1.0, 0.5, 0.5]))
    start = ending(measured, window)
    np.testing.assert_array_equal(
        ending_share(hits[start:], measured[start:], window), ending_share(hits, measured, window)
    )
    assert (measured[start:].sum(axis=0) >= np.minimum(measured.sum(axis=0), window)).all()

    def marks(rows: slice, columns: NDArray[np.int64]) -> tuple[Bools, Bools]:
        return hits[rows][:, columns], measured[rows][:, columns]

    lengths, ever = ending_streaks(marks, steps, 5, window)
    expected, expected_ever = reference_streaks(marks, steps, 5, window)
    np.testing.assert_array_equal(lengths, expected)
    np.testing.assert_array_equal(ever, expected_ever)


def test_only_unbroken_columns_are_read_further_back() -> None:
    requested: list[tuple[slice, list[int]]] = []
    hits = np.ones((1000, 3), dtype=np.bool_)
    hits[990, 0] = hits[10, 2] = False

    def marks(rows: slice, columns: NDArray[np.int64]) -> tuple[Bools, Bools]:
        requested.append((rows, columns.tolist()))
        return hits[rows][:, columns], np.ones_like(hits[rows][:, columns])

    lengths, _ = ending_streaks(marks, 1000, 3, 20)
    assert lengths.tolist() == [9, 1000, 989]
    assert requested == [(slice(920, 1000), [0, 1, 2]), (slice(0, 1000), [1, 2])]


@pytest.mark.parametrize("seed", range(6))
def test_replaced_weights_match_the_median_ratio(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    names = ["a.weight", "b.weight", "c.weight"]
    ratios = large_update.UpdateLimits().update_ratio_once * np.exp(draw.normal(-0.3, 0.4, (60, 3)))
    ratios[30:] *= 1e-6  # lasting large ratios are another finding
    run = build_health_run(
        tmp_path / "run",
        dict.fromkeys(names, [0.1] * 60),
        update=dict(zip(names, ratios.T.tolist(), strict=True)),
    )
    frame = run.frame("update", "ratio")
    limits = large_update.UpdateLimits()
    rows = np.flatnonzero(np.median(frame.values, axis=1) > limits.update_ratio_once)
    found = list(large_update.large_update(run, limits))
    assert [f.subject.step for f in found] == [int(row) for row in rows[:1]]
