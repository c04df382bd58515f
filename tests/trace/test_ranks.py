"""Several ranks: stragglers, clock offsets and missing ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.trace.analysis import analyse
from backlight.trace.events import Trace, TraceError
from backlight.trace.ranks import Straggler, stragglers
from backlight.trace.reader import read_trace
from synthetic_traces import REAL, SKIP_REASON, TraceBuilder

US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank(
    folder: Path, number: int, late: float = 0.0, *, shift: float = 0.0, steps: int = 3, size: int | None = 3,
    extra: bool = False,
) -> Trace:  # fmt: skip
    """One rank whose collective of each step starts ``late`` microseconds after 300 and ends at 600."""
    builder = TraceBuilder(number, shift)
    for step in range(steps):
        begin = 1000 * step
        builder.step(step, begin, 900)
        builder.kernel("ampere_sgemm", begin + 10, begin + 20, 200 + late)
        builder.kernel(NCCL, begin + 30, begin + 300 + late, 300 - late, stream=20)
        if extra:
            builder.kernel(NCCL, begin + 40, begin + 700, 10, stream=20)
    about = {"rank": number} if size is None else {"rank": number, "world_size": size}
    return read_trace(builder.write(folder / f"made{number}.json", distributedInfo=about))


def test_late_rank_is_found_without_common_clock(tmp_path: Path) -> None:
    traces = [rank(tmp_path, 0), rank(tmp_path, 2, 90, shift=5_000_000), rank(tmp_path, 1, 10)]
    found = analyse(traces)
    assert [one.rank for one in found.traces] == [0, 1, 2]
    together = found.ranks
    assert together.given == (0, 1, 2)
    assert together.missing == ()
    assert together.collectives == 3
    assert together.steps[0].waited == {0: 90 * US, 1: 80 * US, 2: 0}
    assert together.steps[0].last == 2
    assert together.steps[0].delay == 85 * US
    assert stragglers(together) == [Straggler((0, 1, 2), 2, pytest.approx(85 / 900), 3, 3)]
    assert together.clocks == "disagree"
    assert together.offsets == {0: 0, 1: 0, 2: 5_000_000 * US}
    assert any("clocks disagree: that of rank 2 is +5000.000 ms" in note for note in together.notes)


def test_clocks_that_agree_and_missing_rank(tmp_path: Path) -> None:
    together = analyse([rank(tmp_path, 0), rank(tmp_path, 2, shift=3.0)]).ranks
    assert together.clocks == "agree"
    assert together.offsets == {0: 0, 2: 3 * US}
    assert together.missing == (1,)
    assert any("2 of 3 ranks given; 1 is missing" in note for note in together.notes)


def test_base_time_of_file_counts(tmp_path: Path) -> None:
    one = rank(tmp_path, 0)
    shifted = rank(tmp_path, 1, shift=-2_000_000)
    other = Trace(shifted.path, shifted.events, shifted.metadata, shifted.count, 1, 3, base=2_000_000 * US)
    together = analyse([one, other]).ranks
    assert together.clocks == "agree"


def test_collectives_of_different_number_are_not_matched(tmp_path: Path) -> None:
    together = analyse([rank(tmp_path, 0), rank(tmp_path, 1, extra=True)]).ranks
    assert together.collectives == 0
    assert together.clocks == "not measured"
    assert together.steps == ()
    assert stragglers(together) == []
    assert any("not measured" in note for note in together.notes)


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    first = rank(tmp_path, 0)
    with pytest.raises(TraceError, match=r"is of rank 0, as .*made0.json is"):
        analyse([first, rank(tmp_path, 0)])
    with pytest.raises(TraceError, match=r"different runs: 3 ranks in .*, 8 ranks in"):
        analyse([first, rank(tmp_path, 1, size=8)])
    unknown = Trace(first.path, first.events, first.metadata, first.count)
    with pytest.raises(TraceError, match="its rank is not known"):
        analyse([first, unknown])


def mesh(folder: Path, number: int, late: dict[str, float], *, names_only: bool = False) -> Trace:
    """One rank of a 2 x 2 mesh: data-parallel groups 0, 2 and 1, 3, tensor-parallel groups 0, 1 and 2, 3."""
    groups = {"dp": (number % 2, number % 2 + 2), "tp": (number // 2 * 2, number // 2 * 2 + 1)}
    builder = TraceBuilder(number)
    for step in range(3):
        begin = 1000 * step
        builder.step(step, begin, 900)
        for name, at in (("tp", 100), ("dp", 400)):
            late_by = late.get(name, 0.0)
            about = {"Process Group Name": name}
            if not names_only:
                about["Process Group Ranks"] = str(list(groups[name]))
            builder.operator("record_param_comms", begin + at - 50, 20, **about)
            builder.kernel(NCCL, begin + at - 40, begin + at + late_by, 200 - late_by, stream=20)
    listed = [{"pg_name": name, "ranks": list(ranks)} for name, ranks in groups.items()]
    about = {"rank": number, "world_size": 4, "pg_config": listed}
    return read_trace(builder.write(folder / f"made{number}.json", distributedInfo=about))


@pytest.mark.parametrize("names_only", [False, True])
def test_ranks_of_a_mesh_are_compared_within_their_groups(tmp_path: Path, names_only: bool) -> None:
    late = {0: {"dp": 10.0}, 1: {}, 2: {"tp": 90.0}, 3: {"dp": 50.0}}
    together = analyse([mesh(tmp_path, n, late[n], names_only=names_only) for n in range(4)]).ranks
    found = {one.group: (one.rank, round(one.delay * 900)) for one in stragglers(together)}
    assert found == {(0, 1): (0, 0), (0, 2): (0, 10), (1, 3): (3, 50), (2, 3): (2, 90)}
    assert together.collectives == 12
    assert together.clocks == "agree"
    assert set(together.offsets) == {0, 1, 2, 3}  # joined over both dimensions of the mesh


def test_ranks_of_different_groups_are_not_compared(tmp_path: Path) -> None:
    together = analyse([mesh(tmp_path, 0, {}), mesh(tmp_path, 3, {"tp": 90.0})]).ranks
    assert together.steps == ()
    assert together.clocks == "not measured"


@pytest.mark.parametrize(("groups", "compared"), [([[0, 1]], True), ([[0, 1], [0]], False)])
def test_collectives_of_gloo_count(tmp_path: Path, groups: list[list[int]], compared: bool) -> None:
    def rank_of(number: int) -> Trace:
        builder = TraceBuilder(number)
        builder.step(1, 0, 900)
        builder.operator("aten::mm", 10, 20)
        builder.add("user_annotation", "gloo:all_reduce", 100 + 70 * number, 300 - 70 * number, tid=9)
        config = [{"pg_name": str(n), "ranks": ranks} for n, ranks in enumerate(groups)]
        about = {"rank": number, "world_size": 2, "pg_config": config}
        return read_trace(builder.write(tmp_path / f"made{number}.json", distributedInfo=about))

    together = analyse([rank_of(0), rank_of(1)]).ranks
    if compared:
        assert stragglers(together) == [Straggler((0, 1), 1, pytest.approx(70 / 900), 1, 1)]
    else:
        assert together.steps == ()
        assert any("2 collectives do not record their process group" in note for note in together.notes)


def test_unrelated_training_runs_are_refused(tmp_path: Path) -> None:
    def run_of(number: int, operators: list[str]) -> Trace:
        builder = TraceBuilder(number)
        builder.step(1, 0, 900)
        for index, name in enumerate(operators):
            builder.operator(name, 10 * index, 5)
        return read_trace(builder.write(tmp_path / f"made{number}.json"))

    first = run_of(0, ["aten::mm", "aten::add", "aten::gelu", "aten::native_layer_norm"])
    other = run_of(1, ["aten::mm", "aten::conv2d", "aten::max_pool2d", "aten::relu", "aten::batch_norm"])
    with pytest.raises(TraceError, match=r"made1.json: is of another training run than .*1 operators"):
        analyse([first, other])
    stage = run_of(1, ["aten::mm", "aten::add", "aten::gelu", "aten::cross_entropy_loss"])
    assert analyse([first, stage]).ranks is not None


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_two_real_ranks_of_128() -> None:
    found = analyse([read_trace(REAL / f"two_ranks_rank-{number}.json.gz") for number in (1, 0)])
    together = found.ranks
    assert (together.given, together.world_size, len(together.missing)) == ((0, 1), 128, 126)
    assert together.clocks == "agree"
    assert together.collectives == 10
    assert [step.step for step in together.steps] == [551, 552]
