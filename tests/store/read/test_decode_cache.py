"""Incremental reads of a growing run equal full reads and decode only new rows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "report"))

from growing import Growing
from synthetic import Plan, write_run

from backlight.store.read import decode_cache, frames
from backlight.store.read.rank_file import Block, RankFile
from backlight.store.read.run import Run, open_growing, open_run

COLUMNS = (("gradient", "rms"), ("gradient", "zero_share"), ("gradient", "non_finite"),
           ("gradient", "measured"), ("update", "ratio"))  # fmt: skip


def assert_same(one: Run, other: Run) -> None:
    for series, column in COLUMNS:
        one_frame, other_frame = one.frame(series, column), other.frame(series, column)
        assert (one_frame.names, one_frame.unit) == (other_frame.names, other_frame.unit)
        assert one_frame.values.dtype == other_frame.values.dtype
        np.testing.assert_array_equal(one_frame.steps, other_frame.steps)
        np.testing.assert_array_equal(one_frame.values, other_frame.values)
        np.testing.assert_array_equal(one_frame.measured, other_frame.measured)
        np.testing.assert_array_equal(one_frame.incomplete(), other_frame.incomplete())
    for attempt in (None, -1):
        one_SR, other_SR = one.spread("loss", attempt=attempt), other.spread("loss", attempt=attempt)
        assert one_SR.ranks == other_SR.ranks
        np.testing.assert_array_equal(one_SR.values, other_SR.values)
    for name, source in (
        ("total_norm", "backlight"),
        ("loss", "backlight"),
        ("phase/backward", "backlight"),
        ("train_accuracy", "user"),
    ):
        if name not in other.scalar_names(source):
            assert name not in one.scalar_names(source)
            continue
        one_S, other_S = one.scalar(name, source), other.scalar(name, source)
        assert one_S.unit == other_S.unit
        np.testing.assert_array_equal(one_S.steps, other_S.steps)
        np.testing.assert_array_equal(one_S.values, other_S.values)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Growing]:
    growing = Growing(tmp_path / "run")
    yield growing
    growing.close()


def test_incremental_read_equals_full_read_at_every_length(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    follow = open_growing()
    for amount, broken in ((7, None), (1, 3), (40, None), (0, None), (90, 2)):
        run.steps(amount, broken=broken)
        assert_same(follow(run.path), open_run(run.path))
    run.close()
    assert_same(follow(run.path), open_run(run.path))
    with pytest.raises(KeyError, match="no scalar is called 'nothing'"):
        follow(run.path).scalar("nothing")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each decode call."""
    decoded: list[int] = []
    whole = RankFile.block

    def counting(*arguments: Any) -> Block:
        block = whole(*arguments)
        decoded.append(len(block.steps))
        return block

    monkeypatch.setattr(RankFile, "block", counting)
    return decoded


def test_only_new_rows_are_decoded(run: Growing, decoded: list[int]) -> None:
    follow = open_growing()
    run.steps(200)
    follow(run.path).frame("gradient", "rms")
    run.steps(3)
    assert len(follow(run.path).frame("gradient", "rms").steps) == 203
    follow(run.path).frame("gradient", "rms")
    assert decoded == [200, 3]


@pytest.mark.slow
def test_returned_arrays_do_not_change(run: Growing) -> None:
    follow = open_growing()
    run.steps(20)
    early = follow(run.path)
    frame, loss = early.frame("gradient", "rms"), early.scalar("loss")
    before = frame.values.copy()
    run.steps(100, broken=1)
    assert len(follow(run.path).frame("gradient", "rms").steps) == 120
    assert len(frame.steps) == len(loss.steps) == 20
    np.testing.assert_array_equal(frame.values, before)
    assert len(early.frame("gradient", "rms").steps) == 20


@pytest.mark.slow
def test_older_snapshot_is_served_from_the_cache(run: Growing, decoded: list[int]) -> None:
    follow = open_growing()
    run.steps(20)
    early, whole = follow(run.path), open_run(run.path)
    assert_same(early, whole)  # read before the run grows
    run.steps(100, broken=1)
    newest = follow(run.path)
    assert_same(newest, open_run(run.path))
    decoded.clear()
    assert_same(early, whole)
    assert_same(newest, newest)
    assert decoded == []
    run.steps(5)
    assert_same(follow(run.path), open_run(run.path))


@pytest.mark.slow
def test_replaced_run_is_decoded_again(tmp_path: Path) -> None:
    follow = open_growing()
    # A shorter run, and a longer one whose first 15 steps equal the other's length.
    for amount in (60, 15, 40):
        run = Growing(tmp_path / "run", Plan(steps=amount, blocks=1))
        run.steps(7, broken=amount % 4)
        run.steps(amount - 7, broken=amount % 4)
        run.close()
        assert_same(follow(run.path), open_run(run.path))
        shutil.rmtree(run.path)


@pytest.mark.slow
def test_attempts_and_rewritten_steps_equal_a_full_read(tmp_path: Path) -> None:
    path = tmp_path / "restarted"
    write_run(path, Plan(steps=60, blocks=1, attempts=2, user={"train_accuracy": 1.0}))
    follow = open_growing()
    assert_same(follow(path), open_run(path))
    run = Growing(tmp_path / "run")
    run.steps(30)
    follow = open_growing()
    follow(run.path).frame("gradient", "rms")
    run.done = 20  # a loop that rewound
    run.steps(25)
    assert_same(follow(run.path), open_run(run.path))
    run.close()


def several(path: Path, *, sharded: bool = True) -> list[Growing]:
    plan = Plan(steps=300, blocks=1)
    return [Growing(path, plan, rank=rank, world_size=2, sharded=sharded) for rank in range(2)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Growing]]:
    opened = several(tmp_path / "run")
    yield opened
    for rank in opened:
        rank.close()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "shards"])
def test_joined_ranks_equal_a_full_read(tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "run"
    ranks = several(path, sharded=sharded)
    follow = open_growing()
    measured = []
    # Equal, one ahead, one stalled, one catching up, nothing new, a loop that rewound.
    for first, second, back in (
        (10, 10, 0),
        (9, 4, 0),
        (6, 0, 0),
        (0, 11, 0),
        (0, 0, 0),
        (8, 8, 5),
        (3, 2, 0),
    ):
        ranks[0].done -= back
        ranks[0].steps(first, broken=3 if first == 6 else None)
        ranks[1].steps(second)
        assert_same(follow(path), open_run(path))
        measured.append(int(follow(path).frame("gradient", "rms").measured.any(axis=1).sum()))
    assert measured == ([10, 19, 25, 25, 25, 33, 35] if not sharded else [10, 14, 14, 25, 25, 28, 31])
    for rank in ranks:
        rank.close()
    assert_same(follow(path), open_run(path))


@pytest.mark.slow
def test_only_new_rows_of_ranks_are_decoded(ranks: list[Growing], tmp_path: Path, decoded: list[int]) -> None:
    follow = open_growing()
    for amount in (200, 3):
        for rank in ranks:
            rank.steps(amount)
        newest = follow(tmp_path / "run")
        newest.frame("gradient", "rms")
        assert len(newest.scalar("total_norm").steps) == ranks[0].done
        newest.frame("gradient", "rms")
    assert decoded == [200, 200, 200, 200, 3, 3, 3, 3]  # rms needs two columns


def test_scalar_names_are_read_once_per_file(
    ranks: list[Growing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ranks:
        rank.steps(9)
    requested: list[Path] = []
    rows = RankFile._rows

    def counting(file: RankFile, table: str, *more: Any, **options: Any) -> list[Any]:
        if table == "scalar_name":
            requested.append(file.path)
        return rows(file, table, *more, **options)

    monkeypatch.setattr(RankFile, "_rows", counting)
    newest = open_growing()(tmp_path / "run")
    for name in ("loss", "total_norm"):
        assert len(newest.scalar(name).steps) == 9
        assert newest.spread(name).ranks == (0, 1)
    assert newest.frame("gradient", "rms").measured.all()
    assert "loss" in newest.scalar_names()
    assert len(requested) == len(set(requested)) == 2


@pytest.mark.slow
def test_older_snapshot_of_ranks_does_not_change(ranks: list[Growing], tmp_path: Path) -> None:
    path = tmp_path / "run"
    follow = open_growing()
    readings = []
    for _ in range(4):
        for rank in ranks:
            rank.steps(7)
        readings.append((follow(path), open_run(path)))
        assert_same(readings[-1][1], readings[-1][1])  # read before the run grows
        follow(path).frame("gradient", "rms")
    for snapshot, whole in reversed(readings):
        assert_same(snapshot, whole)


@pytest.mark.slow
def test_new_rows_are_joined_in_windows_beyond_the_memory_limit(
    ranks: list[Growing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    path = tmp_path / "run"
    follow = open_growing()
    for rank in ranks:
        rank.steps(20)
    assert_same(follow(path), open_run(path))
    for rank, amount in zip(ranks, (30, 24), strict=True):
        rank.steps(amount)
    decoded.clear()
    monkeypatch.setattr(frames, "WINDOW_BYTES", 8_000)
    newest = follow(path)
    newest.frame("gradient", "rms")
    assert sum(decoded) == 54
    assert max(decoded) < 10
    assert_same(newest, open_run(path))


@pytest.mark.slow
def test_only_new_rows_of_a_further_attempt_are_decoded(tmp_path: Path, decoded: list[int]) -> None:
    path = tmp_path / "run"
    first = Growing(path)
    first.steps(30)
    first.close()
    again = Growing(path)
    follow = open_growing()
    again.steps(20)
    assert_same(follow(path), open_run(path))
    again.steps(4)
    newest = follow(path)
    decoded.clear()
    newest.frame("gradient", "rms")
    assert decoded == [4]
    assert_same(newest, open_run(path))
    again.close()
    assert_same(follow(path), open_run(path))


@pytest.mark.slow
def test_new_rank_offset_joins_its_step_again(ranks: list[Growing], tmp_path: Path) -> None:
    path = tmp_path / "run"
    follow = open_growing()
    for rank in ranks:
        rank.steps(8)
    assert follow(path).frame("gradient", "rms").measured[5].all()
    ranks[1].writer.scalars(5, {"backwards_seen": 99.0})
    ranks[1].writer.flush()
    newest = follow(path).frame("gradient", "rms")
    assert not newest.measured[5].any()
    assert newest.measured[6].all()
    assert_same(follow(path), open_run(path))


@pytest.mark.slow
def test_replaced_ranks_are_decoded_again(tmp_path: Path) -> None:
    follow = open_growing()
    for amount in (30, 12, 20):
        ranks = several(tmp_path / "run")
        for rank in ranks:
            rank.steps(5, broken=amount % 3 or None)
            rank.steps(amount - 5)
        assert_same(follow(tmp_path / "run"), open_run(tmp_path / "run"))
        for rank in ranks:
            rank.close()
        shutil.rmtree(tmp_path / "run")


def test_evicted_columns_are_decoded_again(run: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cache, "MAX_CACHE_BYTES", 1)
    follow = open_growing()
    for _ in range(2):
        run.steps(10)
        assert_same(follow(run.path), open_run(run.path))
