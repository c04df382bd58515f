from __future__ import annotations

import math

import numpy as np
import pytest

from backlight.session.sampling import MAX_DETAILED_STEPS, WHOLE_STEPS, StepSelection, window_of


def stored(steps: range, scores: dict[int, float] | None = None, detail: range = range(0)) -> list[int]:
    selection: StepSelection[int] = StepSelection()
    out = []
    for step in steps:
        out += selection.add(step, step, [(scores or {}).get(step, 0.0)], in_detail=step in detail)
    return out + selection.flush()


def test_a_short_run_is_stored_whole() -> None:
    assert stored(range(WHOLE_STEPS)) == list(range(WHOLE_STEPS))


@pytest.mark.slow
def test_growth_is_logarithmic_and_windows_double() -> None:
    counts = [
        len(stored(range(n))) for n in (WHOLE_STEPS, 2 * WHOLE_STEPS, 4 * WHOLE_STEPS, 64 * WHOLE_STEPS)
    ]
    assert counts == [4096, 5120, 6144, 10240]
    assert [window_of(step)[0] for step in (0, 4095, 4096, 8191, 8192, 10**6)] == [1, 1, 4, 4, 8, 512]


@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_a_spike_of_one_step_is_stored_at_its_step_and_in_order(value: float) -> None:
    steps = stored(range(200_000), {123_457: value, 150_001: value})
    assert {123_457, 150_001} <= set(steps)
    assert np.all(np.diff(steps) > 0)
    assert len(steps) == len(stored(range(200_000))) + 2


@pytest.mark.slow
def test_noise_is_thinned_as_if_it_had_no_extremes() -> None:
    noise = dict(enumerate(np.random.default_rng(0).standard_normal(200_000).tolist()))
    steps = stored(range(200_000), noise)
    quiet = stored(range(200_000))
    assert len(steps) < 1.05 * len(quiet)
    late = [noise[step] for step in steps if step > 8192]
    assert abs(np.median(late)) < 0.1


def test_updates_of_every_fourth_step_are_stored_whatever_their_phase() -> None:
    selection: StepSelection[int] = StepSelection()
    steps = [s for n in range(50_000) for s in selection.add(n, n, [0.0], updates=n % 4 == 3)]
    updates = [step for step in steps if step % 4 == 3 and step >= 8192]
    windows = {window_of(step) for step in range(8192, 50_000)}
    assert len(updates) == len(windows)


def test_only_the_highest_of_a_window_stays() -> None:
    quiet = stored(range(20_000))
    assert sorted(set(stored(range(20_000), {19_001: 1.0, 19_002: math.nan, 19_003: 5.0})) - set(quiet)) == [
        19_002
    ]


@pytest.mark.slow
def test_detailed_steps_are_stored_up_to_a_limit() -> None:
    assert set(range(50_000, 50_020)) <= set(stored(range(60_000), detail=range(50_000, 50_020)))
    endless = stored(range(60_000), detail=range(60_000))
    assert len(endless) == len(stored(range(60_000))) + MAX_DETAILED_STEPS


def test_sparse_recording_is_stored_whole() -> None:
    steps = range(0, 100_000, 64)
    assert stored(steps) == list(steps)
