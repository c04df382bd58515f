"""Details of a trace with known values: annotations, launches, queues, streams, sequences, rates."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.trace.analysis import Analysis, RankAnalysis, analyse
from backlight.trace.answer import answer
from backlight.trace.device_queues import FULL_QUEUE, TimeSpread
from backlight.trace.module_times import MIN_STEPS
from backlight.trace.reader import read_trace
from synthetic_traces import REAL, SKIP_REASON, TraceBuilder

Analyse = Callable[[TraceBuilder], RankAnalysis]
US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_annotations_of_one_name_count_once_where_nested(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.add("user_annotation", "block", 10, 300)
    builder.add("user_annotation", "attention", 20, 100)
    builder.kernel("ampere_sgemm", 30, 40, 60)
    builder.add("user_annotation", "block", 150, 100)
    builder.kernel("ampere_sgemm", 160, 170, 20)
    builder.add("user_annotation", "block", 400, 50)
    found = {row.name: row for row in analysed(builder).annotations}
    assert (found["block"].calls, found["block"].host, found["block"].device) == (3, 350 * US, 80 * US)
    assert (found["attention"].host, found["attention"].device) == (100 * US, 60 * US)
    assert found["attention"].share == pytest.approx(0.75)


def test_launches_queues_and_streams(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.kernel("ampere_sgemm", 0, 100, 100)  # call 0 to 5, delay 95
    builder.kernel("ampere_sgemm", 10, 200, 100)  # delay 185
    builder.kernel("ampere_sgemm", 20, 300, 4)  # delay 275, shorter than its launch
    builder.kernel(NCCL, 30, 40, 500, stream=20)  # delay 5
    found = analysed(builder)
    (row,) = found.launches
    assert (row.name, row.calls, row.short) == ("cudaLaunchKernel", 4, 1)
    assert row.call == TimeSpread(5 * US, 5 * US, 5 * US, 5 * US)
    assert (row.delay.min, row.delay.median, row.delay.max) == (5 * US, 140 * US, 275 * US)
    queues = {one.stream: one for one in found.streams}
    assert [one.stream for one in found.streams] == [20, 7]
    assert (queues[7].events, queues[7].busy, queues[7].longest) == (3, 204 * US, 3)
    # One from 0, two from 10, three from 20 to 100, two to 200, one to 300.
    assert queues[7].mean == pytest.approx((10 + 20 + 240 + 200 + 100) / 300)
    assert queues[7].kinds == {"matmul": 204 * US}
    assert queues[20].kinds == {"communication": 500 * US}
    assert queues[7].full == 0


def test_time_at_a_full_queue(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 10_000)
    for number in range(FULL_QUEUE):
        builder.kernel("ampere_sgemm", number, 5000 + 2 * number, 1, took=0.5)
    (stream,) = analysed(builder).streams
    assert stream.longest == FULL_QUEUE
    assert stream.full == (5000 - (FULL_QUEUE - 1)) * US  # from the last launch to the first begin


def test_sequences_that_repeat(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 5000)
    at = 10
    for _ in range(6):
        for name, length in (("gemm_a", 10), ("softmax_b", 20), ("gemm_c", 30)):
            builder.kernel(name, at, at + 5, length)
            at += 50
    builder.kernel("other_d", at, at + 5, 10)
    (found,) = analysed(builder).sequences
    assert (found.kernels, found.count) == (("gemm_a", "softmax_b", "gemm_c"), 6)
    assert found.device == 6 * 60 * US


def test_spread_of_kernels(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 5000)
    for number, length in enumerate((10, 20, 30)):
        builder.kernel("ampere_sgemm", 100 * number, 100 * number + 10, length)
    (row,) = analysed(builder).kernels
    assert (row.shortest, row.longest) == (10 * US, 30 * US)
    assert row.deviation == pytest.approx((200 / 3) ** 0.5 * US)


def test_graph_is_one_launch_of_many_kernels(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.add("cuda_runtime", "cudaGraphLaunch", 10, 50, correlation=7)
    for number in range(3):
        where = {"pid": 0, "tid": 7, "device": 0, "stream": 7, "correlation": 7}
        builder.add("kernel", "ampere_sgemm", 100 + 40 * number, 30, **where)
    (row,) = analysed(builder).launches
    assert (row.calls, row.short) == (1, 0)  # each kernel is shorter than the call, all of them are longer
    assert (row.delay.min, row.delay.max) == (40 * US, 40 * US)


def test_rates_of_operators_copies_and_collectives(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    shapes = {"Input Dims": [[64, 128], [128, 256]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    builder.operator("aten::mm", 10, 20, **shapes)
    builder.kernel("ampere_sgemm", 15, 40, 8)
    shapes = {"Input Dims": [[64, 128], [64, 128], []], "Input type": ["float", "float", "Scalar"]}
    builder.operator("aten::add", 50, 20, **shapes)
    builder.kernel("elementwise_kernel", 55, 70, 4)
    builder.operator("sglang::store_cache", 80, 10, **shapes)  # writes a part of its first input
    builder.kernel("store_kvcache", 85, 90, 4)
    builder.kernel("Memcpy HtoD (Pinned -> Device)", 100, 110, 10, category="gpu_memcpy", bytes=20_000)
    builder.kernel("Memcpy HtoD (Pinned -> Device)", 130, 140, 10, category="gpu_memcpy", bytes=60_000)
    about = {"Process Group Ranks": "[0, 1, 2, 3]", "Collective name": "allreduce", "dtype": "BFloat16"}
    builder.operator("record_param_comms", 200, 20, **about, **{"In msg nelems": 1_000_000})
    builder.kernel(NCCL, 205, 220, 100, stream=20)
    found = analysed(builder)
    by_name = {row.name: row for row in found.operator_rates}
    product, sum_ = by_name["aten::mm"], by_name["aten::add"]
    assert product.tflops == pytest.approx(2 * 64 * 128 * 256 / 8e-6 / 1e12)
    moved = 2 * (64 * 128 + 128 * 256 + 64 * 256)
    assert product.tbytes == pytest.approx(moved / 8e-6 / 1e12)
    assert sum_.tflops is None
    assert by_name["sglang::store_cache"].tbytes is None
    assert sum_.tbytes == pytest.approx(3 * 4 * 64 * 128 / 4e-6 / 1e12)
    (copy,) = found.copy_rates
    assert (copy.min, copy.mean, copy.max) == pytest.approx((2.0, 4.0, 6.0))
    (collective,) = found.collective_rates
    assert (collective.name, collective.ranks, collective.bytes) == ("allreduce", 4, 2_000_000)
    assert collective.bus == pytest.approx(2 * 3 / 4 * 2_000_000 / 100_000)


@pytest.mark.parametrize("name", ["NVIDIA H200", "Some accelerator", ""])
def test_roofline_of_operators_with_known_work(name: str, tmp_path: Path) -> None:
    """512 x 1024 by 1024 x 256 in 1 us: 268 TFLOP/s of 989, and 1.8 TB/s of 4.8."""
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    operands: dict[str, list[Any]] = {"Input Dims": [[512, 1024], [1024, 256]]}
    for number, kind in enumerate(("c10::BFloat16", "c10::BFloat16", "float")):
        at = 100 * number
        builder.operator("aten::mm", at + 10, 20, **operands, **{"Input type": [kind, kind]})
        builder.kernel("gemm", at + 15, at + 40, 1)
    wide = {"Input Dims": [[512, 1024], [512, 1024]], "Input type": ["float", "float"]}
    builder.operator("aten::mul", 510, 20, **wide)
    builder.kernel("elementwise_kernel", 515, 540, 2)
    devices = {"deviceProperties": [{"id": 0, "name": name}]} if name else {}
    (trace,) = analyse([read_trace(builder.write(tmp_path / "made.json", **devices))]).traces
    assert [(g.m, g.n, g.k, g.types, g.calls) for g in trace.gemms] == [
        (512, 256, 1024, "BFloat16", 2), (512, 256, 1024, "float", 1)
    ]  # fmt: skip
    half, full = trace.gemms
    assert half.tflops == pytest.approx(2 * 512 * 256 * 1024 / 1e-6 / 1e12)
    (elementwise,) = (rate for rate in trace.operator_rates if rate.name == "aten::mul")
    if name != "NVIDIA H200":
        assert {rate.of_peak for rate in trace.operator_rates} == {None}
        return
    moved = 2 * (512 * 1024 + 1024 * 256 + 512 * 256)
    assert (half.of_peak, half.limit) == (pytest.approx(moved / 1e-6 / 4.8e12), "memory")
    assert half.tflops / 989 < (half.of_peak or 0.0)
    assert (full.of_peak, full.limit) == (None, "")  # how an H200 multiplies float is a setting
    assert elementwise.of_peak == pytest.approx(3 * 4 * 512 * 1024 / 2e-6 / 4.8e12)


def test_asynchronous_run_states_that_its_path_is_on_the_host(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.kernel("ampere_sgemm", 10, 20, 1000)
    assert any("the host never waits for the device" in note for note in analysed(builder).notes)
    builder.add("cuda_runtime", "cudaDeviceSynchronize", 30, 1000)
    builder.step(2, 1000, 1200)
    assert not any("never waits" in note for note in analysed(builder).notes)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [(10, "limited by the device"), (500, "mostly the next kernel was not launched yet")],
)
def test_verdict_names_what_limits_the_step(analysed: Analyse, launch: float, expected: str) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.kernel("ampere_sgemm", launch, launch + 5, 990 - launch)
    found = analysed(builder)
    assert expected in answer(Analysis((found,), None)).verdict
    assert len(answer(Analysis((found,), None)).facts) <= 10


@pytest.mark.parametrize("launches", [2, 3])
def test_hardware_counters_by_operator(analysed: Analyse, launches: int) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    for number, name in enumerate(("aten::mm", "aten::add", "aten::mm")[:launches]):
        builder.operator(name, 100 * number, 50)
        builder.add("cuda_runtime", "cudaLaunchKernel", 100 * number + 10, 5, correlation=number + 1)
    for number in range(3):
        counters = {"smsp__ffma.sum": 10.0 * (number + 1), "smsp__fadd.sum": 1}
        builder.add("cuda_profiler_range", "kernel", 5000 + number, 1, pid=0, tid=0, **counters)
    found = analysed(builder)
    by_operator = {row.operator: (row.kernels, row.counters) for row in found.hardware_counters}
    if launches == 3:
        assert by_operator == {
            "aten::mm": (2, {"smsp__ffma.sum": 40.0, "smsp__fadd.sum": 2}),
            "aten::add": (1, {"smsp__ffma.sum": 20.0, "smsp__fadd.sum": 1}),
        }
    else:
        assert by_operator == {"(no operator)": (3, {"smsp__ffma.sum": 60.0, "smsp__fadd.sum": 3})}
        assert any("3 ranges of counters and 2 launches do not match" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
@pytest.mark.parametrize("name", ["alexnet", "training_one_gpu", "b200_eager", "mi300_vit"])
def test_queues_launches_and_bandwidths_against_a_plain_loop(name: str) -> None:
    path = REAL / f"{name}.json.gz"
    plain = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    complete = [event for event in plain if event.get("ph") == "X" and "args" in event]
    calls: dict[int, tuple[int, int]] = {}
    for event in complete:
        if event["cat"] in {"cuda_runtime", "cuda_driver", "hip_runtime"} and event["args"].get(
            "correlation"
        ):
            calls.setdefault(event["args"]["correlation"], span(event))
    work = [event for event in complete if event["cat"] in {"kernel", "gpu_memcpy", "gpu_memset"}]
    moments: dict[int, list[tuple[int, int]]] = defaultdict(list)
    delays, rates = [], defaultdict(list)
    for event in work:
        start, end = span(event)
        size, call = event["args"].get("bytes", 0), calls.get(event["args"].get("correlation", 0))
        if size and event["cat"] != "kernel":
            rates[event["name"]].append(size / max(end - start, 1))
        if call is not None:
            moments[event["args"]["stream"]] += [(call[0], -1), (start, 1)]
            if event["cat"] == "kernel":
                delays.append(max(start - call[1], 0))
    longest = {}
    for stream, changes in moments.items():
        length = 0
        for _, change in sorted(changes):
            length -= change
            longest[stream] = max(longest.get(stream, 0), length)
    found = analyse([read_trace(path)]).traces[0]
    inside = {one.stream: one.longest for one in found.streams}
    assert inside == longest
    assert max(row.delay.max for row in found.launches) == max(delays)
    assert sum(row.calls for row in found.launches) == len(delays)
    assert {row.name: row.max for row in found.copy_rates} == pytest.approx(
        {kind: max(values) for kind, values in rates.items()}
    )


def span(event: dict[str, Any]) -> tuple[int, int]:
    start = int(Decimal(event["ts"]) * 1000)
    return start, start + int(Decimal(event["dur"]) * 1000)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_real_queue_is_full_where_launches_block() -> None:
    found = analyse([read_trace(REAL / "training_one_gpu.json.gz")]).traces[0]
    (stream,) = found.streams
    assert stream.longest == FULL_QUEUE
    assert stream.full > 200e6
    (launches,) = found.launches
    assert launches.calls == 4350
    assert sum(row.count for row in found.sequences) > 100
    assert len(answer(Analysis((found,), None)).facts) <= 10


@pytest.mark.parametrize("steps", [9, 10])
def test_optimizers_are_apart_with_their_time_per_step(steps: int, analysed: Analyse) -> None:
    builder = TraceBuilder()
    for step in range(steps):
        begin = 1000 * step
        builder.step(step, begin, 990)
        for name, at, length in (("Muon", 100, 10 + step), ("AdamW", 500, 5)):
            builder.add("user_annotation", f"Optimizer.step#{name}.step", begin + at, 300)
            builder.kernel("multi_tensor_apply_kernel", begin + at + 10, begin + at + 20, length)
    found = {row.name: row for row in analysed(builder).annotations}
    muon, adamw = (found[f"Optimizer.step#{name}.step"] for name in ("Muon", "AdamW"))
    assert (muon.steps, adamw.steps) == (steps, steps)
    if steps < MIN_STEPS:
        assert (muon.device_per_step, muon.host_per_step) == (None, None)
    else:
        assert muon.device_per_step == TimeSpread.of(np.arange(10, 20) * US)
        assert adamw.device_per_step == TimeSpread(5 * US, 5 * US, 5 * US, 5 * US)
        assert adamw.host_per_step == TimeSpread(300 * US, 300 * US, 300 * US, 300 * US)
