"""Scalars of every step: few bytes on the disk, readable at once, and damage is reported."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from backlight.store.format.row_codec import BLOCK_VALUES
from backlight.store.read.run import Run, open_run
from backlight.store.write.compact import compact
from backlight.store.write.writer import RunWriter

STEPS = 20_000
LOSS = np.random.default_rng(0).random(STEPS).astype(np.float32)
RATE = 1e-3 * np.cos(np.arange(STEPS) / 5000)


def write(writer: RunWriter, first: int, end: int) -> None:
    """Log three scalars of each step, as a watched run does."""
    for step in range(first, end):
        values = {"loss": float(LOSS[step]), "lr/0/0": float(RATE[step]), "clip/norm": float(LOSS[-step])}
        writer.scalars(step, values)


def check(run: Run, steps: int) -> None:
    assert np.array_equal(run.scalar("loss").steps, np.arange(steps))
    assert np.array_equal(run.scalar("loss").values, LOSS[:steps])
    assert np.array_equal(run.scalar("lr/0/0").values, RATE[:steps])
    assert run.losses == ()


def database(path: Path) -> Path:
    return path / "attempt-000" / "rank-00000.db"


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, 1000])
def test_three_scalars_of_a_step_take_at_most_32_bytes(tmp_path: Path, every: int) -> None:
    RunWriter.create(tmp_path / "empty").close()
    with RunWriter.create(tmp_path / "run") as writer:
        for first in range(0, STEPS, every):
            write(writer, first, min(first + every, STEPS))
            writer.flush()
    check(open_run(tmp_path / "run"), STEPS)
    size, of_empty = (database(tmp_path / name).stat().st_size for name in ("run", "empty"))
    assert (size - of_empty) / STEPS <= 32


def test_each_flush_is_readable_and_an_opened_run_stays_as_it_was(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    opened = []
    for first in range(0, 1200, 150):
        write(writer, first, first + 150)
        writer.flush()
        opened.append((open_run(tmp_path / "run"), first + 150))
    for run, steps in opened:
        assert np.array_equal(run.scalar("loss").values, LOSS[:steps])
    writer.close()


def test_a_failed_write_keeps_the_unfilled_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter.create(tmp_path / "run")
    write(writer, 0, 100)
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr("backlight.store.write.database.RankDatabase._run", refuse_commit)
        write(writer, 100, 200)
        writer.flush()
    write(writer, 200, 600)
    writer.close()
    check(open_run(tmp_path / "run"), 600)


def refuse_commit(self: object, statement: str) -> list[tuple[object, ...]]:
    if statement == "COMMIT":
        raise sqlite3.OperationalError("the disk had an error")
    connection: sqlite3.Connection = self._connection  # type: ignore[attr-defined]
    return connection.execute(statement).fetchall()


@pytest.mark.parametrize("column", ["id", "first", "size", "step", "floats", "ints"])
def test_a_changed_block_is_left_out_and_counted(tmp_path: Path, column: str) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        write(writer, 0, 1024)
    change = f"{column} || x'00'" if column in {"floats", "ints"} else f"{column} - 5"
    with contextlib.closing(sqlite3.connect(database(tmp_path / "run"))) as connection, connection:
        connection.execute(f"UPDATE scalar SET {column} = {change} WHERE id = {BLOCK_VALUES}")
    run = open_run(tmp_path / "run")
    assert np.array_equal(run.scalar("loss").values, LOSS[342:1024])
    assert any(f"{BLOCK_VALUES} of 3072 rows of table scalar are damaged" in loss for loss in run.losses)


@pytest.mark.slow
def test_a_compacted_run_has_the_same_scalars(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with RunWriter.create(tmp_path / "run") as writer:
        write(writer, 0, 3000)
    compact(tmp_path / "run")
    assert not database(tmp_path / "run").exists()
    check(open_run(tmp_path / "run"), 3000)
