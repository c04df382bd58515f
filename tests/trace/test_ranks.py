"""Several ranks: stragglers, clock offsets and missing ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.trace.analysis import analyse
from backlight.trace.events import Trace, TraceError
from backlight.trace.ranks import straggler
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
    assert straggler(together) == (2, pytest.approx(85 / 900), 3)
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
    other = Trace(shifted.path, shifted.events, shifted.metadata, 1, 3, base=2_000_000 * US)
    together = analyse([one, other]).ranks
    assert together.clocks == "agree"


def test_collectives_of_different_number_are_not_matched(tmp_path: Path) -> None:
    together = analyse([rank(tmp_path, 0), rank(tmp_path, 1, extra=True)]).ranks
    assert together.collectives == 0
    assert together.clocks == "not measured"
    assert together.steps == ()
    assert straggler(together) is None
    assert any("not measured" in note for note in together.notes)


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    first = rank(tmp_path, 0)
    with pytest.raises(TraceError, match=r"is of rank 0, as .*made0.json is"):
        analyse([first, rank(tmp_path, 0)])
    with pytest.raises(TraceError, match=r"different runs: 3 ranks in .*, 8 ranks in"):
        analyse([first, rank(tmp_path, 1, size=8)])
    unknown = Trace(first.path, first.events, first.metadata)
    with pytest.raises(TraceError, match="its rank is not known"):
        analyse([first, unknown])


@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_two_real_ranks_of_128() -> None:
    found = analyse([read_trace(REAL / f"two_ranks_rank-{number}.json.gz") for number in (1, 0)])
    together = found.ranks
    assert (together.given, together.world_size, len(together.missing)) == ((0, 1), 128, 126)
    assert together.clocks == "agree"
    assert together.collectives == 10
    assert [step.step for step in together.steps] == [551, 552]
