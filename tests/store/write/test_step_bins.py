"""Old scalars of every step are thinned: mean, minimum, maximum and number of each bin stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backlight.store.format import row_codec
from backlight.store.read.run import Run, open_growing, open_run
from backlight.store.write import database
from backlight.store.write.compact import compact
from backlight.store.write.writer import RunWriter

STEPS, WHOLE, BINS = 9_000, 1_000, 500
LOSS = np.random.default_rng(0).random(STEPS)
LOSS[1234] = np.nan


@pytest.fixture(autouse=True)
def _thinned_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codec, "WHOLE_STEPS", WHOLE)
    monkeypatch.setattr(row_codec, "MOST_BINS", BINS)


def written(path: Path, steps: int = STEPS, every: int = 250) -> Run:
    writer = RunWriter.create(path)
    write(writer, 0, steps, every)
    writer.close()
    return open_run(path)


def write(writer: RunWriter, first: int, end: int, every: int = 250) -> None:
    """Log the loss of each step, the norm of every 100th, and something of the user."""
    for step in range(first, end):
        writer.scalars(step, {"loss": float(LOSS[step])})
        if step % 100 == 0:
            writer.scalars(step, {"total_norm": 1.0 + step, "clip/norm": 2.0 + step})
            writer.scalars(step, {"mine": float(step)}, source="user")
        if step % every == every - 1:
            writer.flush()


def bins(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    loss = run.scalar("loss")
    of = [run.scalar("loss", source) for source in row_codec.SOURCES]
    for other in of:
        assert np.array_equal(other.steps, of[0].steps)
    at = np.searchsorted(loss.steps, of[0].steps)
    return of[0].steps, loss.values[at], *(other.values for other in of)


def check(run: Run, steps: int = STEPS) -> None:
    """Compare every bin with the values that were logged."""
    (event,) = run.events("thinned")[-1:]
    first, mean, least, greatest, number = bins(run)
    assert len(first)
    for i, step in enumerate(first.tolist()):
        values = LOSS[step : (step // event.payload["every"] + 1) * event.payload["every"]]
        values = values[np.isfinite(values)][: int(number[i])]
        assert len(values) == number[i]
        np.testing.assert_allclose(mean[i], values.mean(), rtol=1e-12)
        assert (least[i], greatest[i]) == (values.min(), values.max())
    loss = run.scalar("loss")
    newest = np.arange(max(int(first[-1]) + event.payload["every"], steps - WHOLE), steps)
    assert np.array_equal(loss.values[np.isin(loss.steps, newest)], LOSS[newest])
    assert np.flatnonzero(~np.isfinite(loss.values)).tolist() == [loss.steps.tolist().index(1234)]
    assert run.losses == ()


@pytest.mark.slow
@pytest.mark.parametrize("every", [100, 250, 1700, 3000])
def test_old_steps_are_bins_and_new_ones_are_whole(tmp_path: Path, every: int) -> None:
    run = written(tmp_path / "run", every=every)
    check(run)
    widths = [event.payload["every"] for event in run.events("thinned")]
    assert widths == sorted(widths)
    assert widths[-1] == 16
    assert run.coverage().with_loss == STEPS
    assert len(run.scalar("loss").steps) < BINS + 2 * WHOLE + every + row_codec.bin_width(STEPS)


@pytest.mark.slow
def test_scalars_that_are_not_of_every_step_are_not_thinned(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    rare = np.arange(0, STEPS, 100)
    assert np.array_equal(run.scalar("total_norm").steps, rare)
    assert np.array_equal(run.scalar("mine", "user").values, rare)
    # Fewer than four in a bin of 16 steps: they stay as they are.
    assert np.array_equal(run.scalar("clip/norm").values, 2.0 + rare)


def test_a_run_of_200000_steps_is_not_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codec, "WHOLE_STEPS", STEPS)
    run = written(tmp_path / "run")
    assert not run.events("thinned")
    assert np.array_equal(run.scalar("loss").values, LOSS, equal_nan=True)
    assert not len(run.scalar("loss", "number").steps)


@pytest.mark.slow
def test_a_reader_of_a_growing_run_sees_it_thinned_or_whole(tmp_path: Path) -> None:
    """One that kept up has every value; one that slept meanwhile reads again what was thinned."""
    writer = RunWriter.create(tmp_path / "run")
    follow, look = open_growing(), open_growing()
    for first in range(0, STEPS, 500):
        write(writer, first, first + 500)
        writer.flush()
        followed = follow(tmp_path / "run")
        assert followed.scalar("loss").steps[-1] == first + 499
        if first == 1500:
            assert len(look(tmp_path / "run").scalar("loss").steps) == 2000
    writer.close()
    assert np.array_equal(followed.scalar("loss").values, LOSS, equal_nan=True)
    check(look(tmp_path / "run"))


@pytest.mark.slow
def test_compaction_keeps_what_is_left(tmp_path: Path) -> None:
    written(tmp_path / "run")
    compact(tmp_path / "run")
    check(open_run(tmp_path / "run"))


@pytest.mark.slow
def test_steps_of_a_long_run_take_a_bounded_space(tmp_path: Path) -> None:
    """What is logged once more as long takes no more room."""
    sizes = []
    for steps in (STEPS // 3, STEPS):
        written(tmp_path / f"{steps}", steps)
        sizes.append((tmp_path / f"{steps}" / "attempt-000" / "rank-00000.db").stat().st_size)
    assert sizes[1] <= 1.5 * sizes[0]


@pytest.mark.slow
def test_a_damaged_block_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise database.RunFormatError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(database, "decode_scalars", refuse)
        writer = RunWriter.create(tmp_path / "run")
        write(writer, 0, STEPS)
        writer.close()
    run = open_run(tmp_path / "run")
    assert not run.events("thinned")
    assert np.array_equal(run.scalar("loss").values, LOSS, equal_nan=True)
