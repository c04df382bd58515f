from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.records import ParameterRecord
from backlight.store.read.run import open_run
from backlight.store.write.database import DiskBudget
from backlight.store.write.writer import RunWriter

Record = Callable[..., tuple[ParameterRecord, ...]]


@pytest.mark.parametrize(
    ("used", "stride"),
    [(0, 1), (499, 1), (500, 4), (749, 4), (750, 16), (875, 64), (937, 64), (938, 256), (2000, 0)],
)
def test_spacing_grows_as_the_budget_shrinks(used: int, stride: int) -> None:
    budget = DiskBudget(1000)
    assert budget.update(used) is (stride != 1)
    assert budget.stride == stride


def test_no_limit_keeps_everything() -> None:
    budget = DiskBudget(None)
    assert budget.update(10**15) is False
    assert all(budget.keeps(step) for step in range(100))
    assert budget.fits(10**15)


def test_spacing_counts_recorded_steps() -> None:
    budget = DiskBudget(100)
    budget.update(60)
    kept = [step for step in range(0, 160, 10) for _ in range(3) if budget.keeps(step)]
    assert kept == [0, 0, 0, 40, 40, 40, 80, 80, 80, 120, 120, 120]


@pytest.mark.slow
def test_run_of_any_length_fits_the_limit(tmp_path: Path, record: Record) -> None:
    limit = 2_000_000
    messages: list[str] = []
    writer = RunWriter.create(tmp_path / "run", max_disk=limit, flush_interval=0.0, on_limit=messages.append)
    for start in range(0, 30_000, 250):
        record(writer, 250, start=start, names=30)
        writer.flush()
    writer.close()
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
    run = open_run(tmp_path / "run")
    steps = run.series_steps("gradient")
    assert len(steps) < 5_000
    assert steps[-1] > 10_000
    assert set(np.diff(steps[:100]).tolist()) == {1}
    assert np.diff(steps).max() >= 16
    assert np.array_equal(run.scalar("loss").steps, steps)
    strides = [e.payload["stride"] for e in run.events("disk_limit")]
    assert strides == sorted(strides)
    assert strides[0] == 4
    assert len(messages) == 1
    assert "of 2000000 bytes used" in messages[0]
    assert "every 4th recorded step" in messages[0]
    assert size <= limit


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [1, pytest.param(100, marks=pytest.mark.full)])
def test_scalars_and_the_log_are_within_the_limit(tmp_path: Path, record: Record, parameters: int) -> None:
    path, limit = tmp_path / "run", 2_000_000
    writer = RunWriter.create(path, max_disk=limit, flush_interval=0.0)
    largest = 0
    for step in range(20_000):
        writer.scalars(step, {f"scalar/{i}": step / 7 for i in range(15)})
        writer.scalars(step, {"mine": 1.0}, source="user")
        record(writer, 1, start=step, names=parameters)
        if step % 250 == 0:
            writer.flush()
            largest = max(largest, sum(p.stat().st_size for p in path.rglob("*") if p.is_file()))
    writer.close()
    run = open_run(path)
    assert largest <= 1.1 * limit
    assert np.array_equal(run.scalar("scalar/3").steps, run.series_steps("gradient"))
    assert 100 < len(run.scalar("mine", "user").steps) < 20_000
    assert run.last_step() > 10_000


def test_late_numbers_of_a_step_are_kept_with_it() -> None:
    budget = DiskBudget(100)
    budget.update(60)
    order = [0, 1, 0, 2, 1, 3, 2, 4, 3, 4]
    assert [step for step in order if budget.keeps(step)] == [0, 0, 4, 4]


def test_array_over_the_limit_is_skipped_and_reported(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", max_disk=100_000)
    writer.array("big", 0, np.zeros(100_000))
    writer.array("small", 0, np.zeros(10))
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.array_names() == ("small",)
    assert any("max_disk reached" in loss and "array big" in loss for loss in run.losses)


@pytest.mark.slow
def test_size_of_earlier_attempts_is_included(tmp_path: Path, record: Record) -> None:
    record(tmp_path / "run", 2000, names=30)
    writer = RunWriter.create(tmp_path / "run", max_disk=1_000_000, flush_interval=0.0, resume=True)
    record(writer, 10, names=30)
    writer.flush()
    record(writer, 100, start=10, names=30)
    writer.close()
    run = open_run(tmp_path / "run")
    assert len(run.frame("gradient", "norm", attempt=1).steps) < 100
    assert run.events("disk_limit")
