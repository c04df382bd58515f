"""Ranks whose columns exceed the memory limit are joined in windows of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.records import Layout, ParameterRecord, Placement
from backlight.store.read import frames
from backlight.store.read.rank_file import Block, RankFile
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

pytestmark = pytest.mark.slow

COLUMNS = ("norm", "max_abs", "nan", "rms", "measured")


def record(path: Path, ranks: int, steps: dict[int, range], launch: str) -> None:
    """Record ranks with one row each of a parameter at their given steps, the last step twice."""
    writers = [
        RunWriter.create(path, rank=r, world_size=ranks, run_id=launch, resume=True) for r in range(ranks)
    ]
    for rank, writer in enumerate(writers):
        placement = Placement(Layout.SHARD, (ranks, 4), (1, 4), (rank, 0))
        identifier = writer.parameter_table(
            (ParameterRecord("w", (ranks, 4), "float32", "cpu", 4, placement=placement),)
        )
        source = np.random.default_rng(rank)
        for step in [*steps.get(rank, range(12)), 3]:
            ints = np.array([[1, 4, 0, int(step == 5), 0]])
            writer.append("gradient", step, identifier, np.exp(source.standard_normal((1, 3))), ints)
        writer.close()


def test_windowed_join_equals_full_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    record(path, 3, {1: range(0, 12, 2), 2: range(4, 15)}, "a")
    record(path, 3, {}, "b")
    whole = open_run(path)
    assert len(whole.series_steps("gradient")) > 20
    calls: list[tuple[int, int] | None] = []
    original = RankFile.block

    def counting(*arguments: Any) -> Block:
        calls.append(arguments[5])
        return original(*arguments)

    monkeypatch.setattr(RankFile, "block", counting)
    for limit in (1, 300, 1000):
        monkeypatch.setattr(frames, "WINDOW_BYTES", limit)
        parts = open_run(path)
        for column in COLUMNS:
            windowed, full = parts.frame("gradient", column), whole.frame("gradient", column)
            np.testing.assert_array_equal(windowed.steps, full.steps)
            np.testing.assert_array_equal(windowed.values, full.values)
            np.testing.assert_array_equal(windowed.measured, full.measured)
            assert full.measured.any()
        assert parts.losses == whole.losses
    assert len({window for window in calls if window is not None}) > 10
    monkeypatch.setattr(frames, "WINDOW_BYTES", 10**9)
    calls.clear()
    open_run(path).frame("gradient", "norm")
    assert set(calls) == {None}
