from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.records import Layout, ParameterRecord, Placement
from backlight.store.read.frames import model_order
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(st.lists(NAMES, max_size=4))
def test_names_are_unique_in_the_order_of_the_first_table(tables: list[list[str]]) -> None:
    order = model_order(tables)
    assert sorted(order) == sorted({name for table in tables for name in table})
    first = next((table for table in tables if table), [])
    assert [name for name in order if name in first] == first


def test_new_name_follows_its_predecessor() -> None:
    assert model_order([["a", "b", "c"], ["a", "x", "b", "c", "y"], ["z", "a"]]) == tuple("zaxbcy")


def statistics(values: np.ndarray) -> tuple[list[float], list[int]]:
    with np.errstate(invalid="ignore", over="ignore"):
        floats = [
            float(np.sqrt(np.sum(np.square(values)))),
            float(np.max(np.abs(values), initial=0.0)),
            float(np.sum(values)),
        ]
    ints = [
        1,
        values.size,
        int((values == 0).sum()),
        int(np.isnan(values).sum()),
        int(np.isinf(values).sum()),
    ]
    return floats, ints


def write_ranks(
    path: Path, ranks: list[list[tuple[ParameterRecord, np.ndarray | None]]], steps: int = 1
) -> Run:
    writers = [RunWriter.create(path, rank=r, world_size=len(ranks), run_id="x") for r in range(len(ranks))]
    for writer, rows in zip(writers, ranks, strict=True):
        table = writer.parameter_table(tuple(record for record, _ in rows))
        numbers = [([0.0] * 3, [0] * 5) if v is None else statistics(v) for _, v in rows]
        for step in range(steps):
            writer.append("gradient", step, table, [n[0] for n in numbers], [n[1] for n in numbers])
    for writer in writers:
        writer.close()
    run = open_run(path)
    assert run.losses == ()
    return run


def shard(name: str, whole: int, start: int, stop: int, replicas: int = 1) -> ParameterRecord:
    placement = Placement(Layout.SHARD, (whole,), (stop - start,), (start,), replicas)
    return ParameterRecord(name, (whole,), "float32", "cpu", stop - start, placement=placement)


COLUMNS = (
    "norm",
    "max_abs",
    "sum",
    "numel",
    "zeros",
    "nan",
    "inf",
    "rms",
    "mean",
    "non_finite",
    "zero_share",
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_joined_shards_and_replicas_equal_one_process(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, 4))
    copies = data.draw(st.sampled_from([1, 2])) if world > 1 else 1
    size = data.draw(st.integers(1, 12))
    source = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = source.choice([0.0, 1.0, -2.5, 1e100, np.inf, np.nan], size, p=[0.2, 0.3, 0.3, 0.1, 0.05, 0.05])
    cuts = np.sort(source.integers(0, size + 1, world - 1))
    edges = [0, *cuts.tolist(), size]
    ranks = [
        [
            (shard("w", size, edges[r], edges[r + 1], copies), values[edges[r] : edges[r + 1]]),
            (ParameterRecord("b", (size,), "f", "cpu", size, placement=Placement(Layout.REPLICATE)), values),
        ]
        for r in range(world)
        for _ in range(copies)
    ]
    run = write_ranks(tmp_path_factory.mktemp("run"), ranks)
    alone = ParameterRecord("w", (size,), "float32", "cpu", size)
    control = ParameterRecord("b", (size,), "float32", "cpu", size)
    whole = write_ranks(tmp_path_factory.mktemp("run"), [[(alone, values), (control, values)]])
    for column in COLUMNS:
        got, expected = run.frame("gradient", column), whole.frame("gradient", column)
        assert got.measured.all()
        # Shards are summed in another order.
        np.testing.assert_allclose(got.values, expected.values, rtol=1e-12, atol=1e-12)


def test_norm_with_overflowing_square_is_joined_correctly(tmp_path: Path) -> None:
    writers = [RunWriter.create(tmp_path, rank=r, world_size=2, run_id="x") for r in range(2)]
    for r, writer in enumerate(writers):
        table = writer.parameter_table((shard("w", 2, r, r + 1),))
        writer.append("gradient", 0, table, [[(3 + r) * 1e200] * 3], [[1, 1, 0, 0, 0]])
        writer.close()
    assert open_run(tmp_path).frame("gradient", "norm").values[0, 0] == pytest.approx(5e200)


def test_empty_shard_does_not_affect_the_join(tmp_path: Path) -> None:
    values = np.array([3.0, 4.0])
    empty = shard("w", 2, 2, 2)
    for i, numbers in enumerate((None, values[2:])):
        run = write_ranks(tmp_path / str(i), [[(shard("w", 2, 0, 2), values)], [(empty, numbers)]])
        assert run.frame("gradient", "norm").values.tolist() == [[5.0]]
        assert run.frame("gradient", "max_abs").values.tolist() == [[4.0]]


def test_unmeasured_shard_makes_the_parameter_unmeasured(tmp_path: Path) -> None:
    values = np.array([3.0, 4.0])
    run = write_ranks(tmp_path, [[(shard("w", 2, 0, 1), values[:1])], [(shard("w", 2, 1, 2), None)]])
    frame = run.frame("gradient", "norm")
    assert (frame.measured.tolist(), np.isnan(frame.values).all()) == ([[False]], True)
    assert run.frame("gradient", "norm", rank=0).values.tolist() == [[3.0]]
    assert run.frame("gradient", "zeros").values.tolist() == [[0]]


def test_step_missing_on_one_shard_is_unmeasured(tmp_path: Path) -> None:
    writers = [RunWriter.create(tmp_path, rank=r, world_size=2, run_id="x") for r in range(2)]
    for r, writer in enumerate(writers):
        table = writer.parameter_table((shard("w", 2, r, r + 1),))
        for step in range(3 - r):
            writer.append("gradient", step, table, [[1.0, 1.0, 1.0]], [[1, 1, 0, 0, 0]])
        writer.close()
    frame = open_run(tmp_path).frame("gradient", "norm")
    assert frame.measured[:, 0].tolist() == [True, True, False]
    assert frame.values[:2, 0].tolist() == [np.sqrt(2.0)] * 2


def test_unreduced_partials_are_unmeasured(tmp_path: Path) -> None:
    partial = ParameterRecord("w", (2,), "f", "cpu", 2, placement=Placement(Layout.PARTIAL))
    run = write_ranks(tmp_path, [[(partial, np.ones(2))], [(partial, np.ones(2))]])
    assert not run.frame("gradient", "norm").measured.any()
    assert run.frame("gradient", "norm", rank=1).measured.all()


def test_replica_is_read_from_the_rank_that_measured_it(tmp_path: Path) -> None:
    control = ParameterRecord("w", (2,), "f", "cpu", 2, placement=Placement(Layout.REPLICATE, replicas=2))
    run = write_ranks(tmp_path, [[(control, None)], [(control, np.array([3.0, 4.0]))]])
    assert run.frame("gradient", "norm").values.tolist() == [[5.0]]
    assert run.frame("gradient", "numel").values.tolist() == [[2]]


def test_parameter_of_one_rank_is_read_from_it(tmp_path: Path) -> None:
    joined, yours = (ParameterRecord(n, (1,), "f", "cpu", 1) for n in "ab")
    run = write_ranks(tmp_path, [[(joined, np.array([1.0]))], [(yours, np.array([2.0]))]])
    assert run.frame("gradient", "norm").names == ("a", "b")
    assert run.frame("gradient", "norm").values.tolist() == [[1.0, 2.0]]


def test_nan_on_one_shard_gives_nan(tmp_path: Path) -> None:
    ranks = [[(shard("w", 2, i, i + 1), np.array([v]))] for i, v in enumerate([5.0, np.nan])]
    run = write_ranks(tmp_path, ranks)
    assert np.isnan(run.frame("gradient", "max_abs").values).all()
    assert run.frame("gradient", "nan").values.tolist() == [[1]]


def whole(name: str, size: int) -> ParameterRecord:
    return ParameterRecord(name, (size,), "float32", "cpu", size)


@pytest.mark.parametrize("order", [(2, 1), (1, 2), (2, 1, 2)])
def test_attempts_of_several_ranks_and_of_one_process_are_joined(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    values = np.arange(1.0, 9.0)
    for attempt, ranks in enumerate(order):
        writers = [
            RunWriter.create(tmp_path / "run", rank=r, world_size=ranks, run_id=f"x-{attempt}", resume=True)
            for r in range(ranks)
        ]
        for rank, writer in enumerate(writers):
            own = values.reshape(ranks, -1)[rank]
            record = shard("w", 8, rank * len(own), (rank + 1) * len(own)) if ranks > 1 else whole("w", 8)
            floats, ints = statistics(own)
            writer.append("gradient", 0, writer.parameter_table((record,)), [floats], [ints])
        for writer in reversed(writers):
            writer.close()
    run = open_run(tmp_path / "run")
    for column in COLUMNS:
        frame = run.frame("gradient", column)
        assert frame.steps.tolist() == list(range(len(order)))
        assert frame.measured.all()
        np.testing.assert_allclose(frame.values, frame.values[:1].repeat(len(order), axis=0), rtol=1e-12)
    assert run.frame("gradient", "norm").values[0, 0] == pytest.approx(np.linalg.norm(values), rel=1e-12)
