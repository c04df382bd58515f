"""The difference of two traces, and the overlay that Perfetto opens."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from backlight.cli import app as application
from backlight.trace.analysis import RankAnalysis, analyse
from backlight.trace.critical_path import Paths
from backlight.trace.events import TraceError
from backlight.trace.perfetto import TRACK, save_overlay
from backlight.trace.reader import read_trace
from backlight.trace.timeline import Timeline
from backlight.trace.trace_diff import diff
from synthetic_traces import LAYOUTS, REAL, SKIP_REASON, TraceBuilder, write


def made(matmul: float, *, steps: int = 2, extra: bool = False) -> TraceBuilder:
    """Steps with one matrix product of ``matmul`` microseconds."""
    builder = TraceBuilder()
    for step in range(steps):
        begin = 1000 * step
        builder.step(step, begin, 900)
        builder.operator("aten::mm", begin + 10, 30)
        builder.kernel("ampere_sgemm", begin + 15, begin + 50, matmul)
        if extra:
            builder.operator("aten::gelu", begin + 60, 30)
            builder.kernel("elementwise_kernel", begin + 65, begin + 700, 40)
        builder.add("cuda_runtime", "cudaStreamSynchronize", begin + 100, 400)
    return builder


def analysis_of(builder: TraceBuilder, path: Path) -> RankAnalysis:
    return analyse([read_trace(builder.write(path))]).traces[0]


def test_difference_is_per_step_and_adds_up(tmp_path: Path) -> None:
    first = analysis_of(made(400), tmp_path / "a.json")
    second = analysis_of(made(300, steps=4, extra=True), tmp_path / "b.json")
    found = diff(first, second)
    assert (found.where, found.steps) == ("device", (2, 4))
    assert found.total == (400_000, 340_000)
    rows = {row.name: row for row in found.operators}
    assert (rows["aten::mm"].time, rows["aten::mm"].change) == ((400_000, 300_000), -100_000)
    assert (rows["aten::gelu"].calls, rows["aten::gelu"].change) == ((0, 1), 40_000)
    for table in (found.kinds, found.operators, found.kernels):
        assert sum(row.change for row in table) == pytest.approx(found.total[1] - found.total[0])
        assert abs(table[0].change) == max(abs(row.change) for row in table)


def layers(*modules: str, backward: float = 40) -> TraceBuilder:
    """A step of a network of ``modules``, each with one operator and its backward."""
    builder = TraceBuilder()
    builder.step(0, 0, 2000)
    builder.add("python_function", "nn.Module: Net_0", 5, 900)
    for number, module in enumerate(modules):
        at = 10 + 100 * number
        builder.add("python_function", f"nn.Module: {module}_{number}", at, 80)
        where = {"Sequence number": 7 + number, "Fwd thread id": 0}
        builder.operator("aten::mm", at + 5, 30, **where)
        builder.kernel("gemm", at + 10, at + 20, 50)
        at = 1000 + 100 * number
        name = "autograd::engine::evaluate_function: MmBackward0"
        builder.operator(name, at, 60, **{"Sequence number": 7 + number, "Fwd thread id": 1})
        builder.operator("MmBackward0", at + 5, 40, **{"Sequence number": 7 + number, "Fwd thread id": 1})
        builder.kernel("gemm", at + 10, at + 20, backward)
    builder.operator("aten::add", 1900, 30)
    builder.kernel("elementwise_kernel", 1905, 1910, 10)
    return builder


def test_modules_are_compared_with_their_backward(tmp_path: Path) -> None:
    first = analysis_of(layers("Linear", "LayerNorm", "Linear"), tmp_path / "a.json")
    second = analysis_of(layers("Linear", "RMSNorm", "Linear", backward=60), tmp_path / "b.json")
    found = diff(first, second)
    times: dict[str, list[float]] = {}
    for row in found.modules:
        both = times.setdefault(row.name, [0.0, 0.0])
        both[:] = both[0] + row.time[0] / 1e3, both[1] + row.time[1] / 1e3
    assert times == {
        "Net": [0, 0], "Net.Linear": [180, 220], "Net.LayerNorm": [90, 0], "Net.RMSNorm": [0, 110],
        "(no module)": [10, 10],
    }  # fmt: skip
    assert sum(row.change for row in found.modules) == pytest.approx(found.total[1] - found.total[0])
    calls = {row.name: row.calls for row in found.modules if row.calls != (0, 0)}
    assert calls == {"Net": (1, 1), "Net.Linear": (2, 2), "Net.LayerNorm": (1, 0), "Net.RMSNorm": (0, 1)}
    plain = analysis_of(made(400), tmp_path / "c.json")
    assert not diff(first, plain).modules  # its modules are not recorded


@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_trace_does_not_differ_from_itself() -> None:
    one = analyse([read_trace(REAL / "alexnet.json.gz")]).traces[0]
    found = diff(one, one)
    assert {row.change for table in (found.kinds, found.operators, found.kernels) for row in table} == {0.0}
    assert found.total[0] == one.device_total


@pytest.mark.slow
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(400).write(tmp_path / "a.json"), made(300).write(tmp_path / "b.json.gz")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            application.main(["trace", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    code, out, _ = call(first, "--against", second)
    assert code == 0
    assert "device per step 0.400 ms to 0.300 ms (-0.100 ms)" in out
    code, out, _ = call(first, "--against", second, "--json")
    assert json.loads(out)["operators"][0]["time"] == [400_000, 300_000]
    code, _, errors = call(first, second, "--against", second)
    assert code == 2
    assert "expected one trace before them, got 2" in errors
    code, _, errors = call(first, "--overlay", tmp_path / "overlay.json")
    assert code == 0
    assert "events added" in errors
    code, _, errors = call(first, "--overlay", first)
    assert code == 2
    assert "is the trace itself" in errors


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlay_keeps_the_trace_and_adds_the_path(tmp_path: Path, layout: str, suffix: str) -> None:
    source = write(tmp_path / "trace.json.gz", made(400).events, layout)
    target = tmp_path / f"overlay{suffix}"
    timeline = Timeline(read_trace(source))
    added = save_overlay(timeline, target)
    data = gzip.decompress(target.read_bytes()) if suffix.endswith("gz") else target.read_bytes()
    document = json.loads(data)
    events = document if isinstance(document, list) else document["traceEvents"]
    original = json.loads(gzip.decompress(source.read_bytes()))
    assert events[added:] == (original if isinstance(original, list) else original["traceEvents"])
    path = [event for event in events[:added] if event["ph"] == "X"]
    assert {event["pid"] for event in events[:added]} == {TRACK}
    assert sum(event["dur"] for event in path) == pytest.approx(2 * 900)
    assert {event["args"]["where"] for event in path} == {"host", "device", "launch", "wait"}
    assert any(event["ph"] == "C" for event in events[:added])


@pytest.mark.parametrize(
    "shift", [0.001, 1_712_195_495_519_689.047]
)  # a recent trace, one that counts from 1970
def test_parts_do_not_overlap_as_perfetto_reads_them(tmp_path: Path, shift: float) -> None:
    builder = made(0.213, steps=40)
    for event in builder.events:
        event["ts"] = Decimal(str(event["ts"])) + Decimal(str(shift))
    timeline = Timeline(read_trace(builder.write(tmp_path / "a.json")))
    save_overlay(timeline, tmp_path / "b.json")
    events = json.loads((tmp_path / "b.json").read_bytes())["traceEvents"]
    path = [event for event in events if event.get("cat") == "critical_path"]
    # Perfetto reads whole microseconds exactly, others as floats; it drops slices that begin inside others.
    times = [
        [
            time * 1000 if isinstance(time, int) else round(time * 1000.0)
            for time in (event["ts"], event["dur"])
        ]
        for event in path
    ]
    assert all(start + length <= later for (start, length), (later, _) in pairwise(times))
    assert sum(event["args"]["ns"] for event in path) == 40 * 900_000
    assert sum(length for _, length in times) == pytest.approx(40 * 900_000, abs=40 * 1000)


def test_parts_of_the_path_follow_each_other(tmp_path: Path) -> None:
    timeline = Timeline(read_trace(made(400).write(tmp_path / "a.json")))
    for step in timeline.steps:
        parts = Paths(timeline).parts(step)
        assert (parts[0].start, parts[-1].end) == (step.start, step.end)
        assert all(one.end == other.start for one, other in pairwise(parts))


def test_overlay_of_a_missing_step_is_refused(tmp_path: Path) -> None:
    timeline = Timeline(read_trace(made(400).write(tmp_path / "a.json")))
    with pytest.raises(TraceError, match="has no step 9"):
        save_overlay(timeline, tmp_path / "b.json", 9)
    assert not (tmp_path / "b.json").exists()


def test_series_of_the_overlay_add_up_to_bytes_and_queue_times(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    name = "Memcpy HtoD (Pinned -> Device)"
    for launch, start, length, size in ((0, 100, 50, 1_000_000), (10, 120, 100, 500_000), (400, 500, 10, 7)):
        builder.kernel(name, launch, start, length, category="gpu_memcpy", call="cudaMemcpyAsync", bytes=size)
    timeline = Timeline(read_trace(builder.write(tmp_path / "a.json")))
    save_overlay(timeline, tmp_path / "b.json")
    events = json.loads((tmp_path / "b.json").read_bytes())["traceEvents"]
    total = {}
    for series in ("bandwidth of " + name, "queue of stream 7 on device 0"):
        points = [event for event in events if event["ph"] == "C" and event["name"] == series]
        values = [(1000 * event["ts"], *event["args"].values()) for event in points]
        total[series] = sum(value * (later - time) for (time, value), (later, _) in pairwise(values))
        assert values[-1][1] == 0
    copied, queued = total.values()
    assert copied == pytest.approx(1_500_007, rel=1e-3)  # GB/s are written with three decimals
    assert queued == pytest.approx((100 + 110 + 100) * 1000)  # from launch to begin
