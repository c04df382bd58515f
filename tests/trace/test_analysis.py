"""Tables of traces with known results, and invariants of every trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.trace import analysis
from backlight.trace.analysis import RankAnalysis, analyse
from backlight.trace.classification import short
from backlight.trace.events import TraceError
from backlight.trace.operators import Costs, joined
from backlight.trace.reader import read_trace
from backlight.trace.timeline import Timeline, tree
from backlight.trace.utilization import Idle
from synthetic_traces import REAL, SKIP_REASON, TraceBuilder

Analyse = Callable[[TraceBuilder], RankAnalysis]
US = 1000
GEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_causes_of_idle_time(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.kernel(GEMM, 10, 20, 80)  # idle 0-10 host, 10-20 launch
    builder.kernel(GEMM, 30, 110, 40)  # launched early: idle 100-110 launch
    builder.add("cuda_runtime", "cudaStreamWaitEvent", 34, 1)
    builder.kernel(GEMM, 35, 250, 50)  # launched early, waits 150-250 for an event: queued
    builder.add("cuda_runtime", "cudaStreamSynchronize", 60, 250)  # until 310; the device is done at 300
    builder.kernel(GEMM, 400, 405, 95)  # idle 300-400 after the wait, 5 of latency
    builder.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 520, 60)
    builder.kernel(GEMM, 600, 600, 100)  # idle 500-600, of it 60 for data
    builder.add("user_annotation", "gloo:all_reduce", 720, 70)
    builder.kernel(GEMM, 800, 800, 150)  # idle 700-800, of it 70 for communication; then 950-1000 to the end
    found = analysed(builder)
    row = found.steps[0]
    assert row.idle == Idle(
        host_bound=(10 + 40 + 30 + 50) * US,
        synchronisation=100 * US,
        data=60 * US,
        communication=70 * US,
        launch_gap=(10 + 10 + 5) * US,
        queued=100 * US,
    )
    assert row.busy == (80 + 40 + 50 + 95 + 100 + 150) * US
    assert row.busy + row.idle.total == row.duration == 1000 * US
    assert analysis.idle_share(found) == pytest.approx(0.485)
    assert sum(analysis.idle_causes(found).values()) == pytest.approx(1)


@pytest.mark.parametrize(("took", "host"), [(85, 85), (5, 0)])
def test_launch_that_takes_long_has_launched_when_it_returns(analysed: Analyse, took: int, host: int) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 200)
    builder.kernel(GEMM, 10, 100, 100, took=took)  # the first launch of a kernel loads its code
    row = analysed(builder).steps[0]
    assert row.idle == Idle(
        host_bound=(10 + host) * US, launch_gap=5 * US if host else 0, unknown=0 if host else 90 * US
    )
    assert row.busy == 100 * US


@pytest.mark.parametrize(
    ("reason", "is_queued"),
    [("none", False), ("event", True), ("event of another launch", False), ("other device", True)],
)
def test_launched_work_waits_only_for_what_the_trace_shows(
    analysed: Analyse, reason: str, is_queued: bool
) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 600)
    builder.kernel(GEMM, 10, 20, 80)
    if reason == "event":
        builder.add("cuda_runtime", "cudaStreamWaitEvent", 32, 3)
    if reason == "event of another launch":
        builder.add("cuda_runtime", "cudaStreamWaitEvent", 32, 3)
        builder.kernel(GEMM, 36, 105, 5, stream=9)
    builder.kernel(GEMM, 45, 300, 50)  # launched early, begins after 190 idle microseconds or more
    if reason == "other device":
        builder.add("kernel", GEMM, 150, 200, pid=1, tid=7, device=1, stream=7)
    row = analysed(builder).steps[0]
    idle = 190 * US if reason == "event of another launch" else 200 * US
    assert (row.idle.queued, row.idle.unknown) == ((idle, 0) if is_queued else (0, idle))


@pytest.mark.parametrize(
    ("copy", "waited"),
    [
        ("Memcpy DtoH (Device -> Pageable)", True),
        ("CopyDeviceToHost", True),
        ("Memcpy DtoH (Device -> Pinned)", False),
        ("Memcpy DtoD (Device -> Device)", False),
    ],
)
def test_copy_that_returns_after_its_event_is_a_wait(analysed: Analyse, copy: str, waited: bool) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.kernel(GEMM, 10, 20, 480)
    call = {"call": "cudaMemcpyAsync", "category": "gpu_memcpy"}
    builder.kernel(copy, 30, 500, 20, took=570, **call)  # returns at 600, 80 after the copy
    builder.kernel(GEMM, 700, 700, 100)
    row = analysed(builder).steps[0]
    assert row.idle.synchronisation == (180 * US if waited else 0)
    assert row.critical_path.synchronisation == (80 * US if waited else 0)
    assert row.critical_path.device.get("matmul", 0) == (480 * US if waited else 0)


def test_critical_path_passes_events_without_length(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 410)
    builder.kernel(GEMM, 10, 100, 100)
    builder.kernel(GEMM, 20, 300, 100)
    builder.kernel("Memset (Device)", 240, 250, 0, category="gpu_memset")
    builder.add("cuda_runtime", "cudaStreamSynchronize", 260, 150)
    path = analysed(builder).steps[0].critical_path
    assert (sum(path.host.values()), path.device) == (240 * US, {"matmul": 100 * US})
    assert (path.launch, path.synchronisation) == (60 * US, 10 * US)


def test_overlap_and_shares(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(7, 0, 1000)
    builder.operator("aten::mm", 0, 50)
    builder.kernel(GEMM, 1, 100, 200)  # 100-300
    builder.operator("aten::add", 60, 30)
    builder.kernel(ADD, 61, 300, 100)  # 300-400
    builder.operator("record_param_comms", 100, 30, tid=2)
    builder.kernel(NCCL, 101, 250, 300, stream=20, tid=2)  # 250-550: 150 hidden, 150 exposed
    builder.kernel("Memcpy HtoD (Pinned -> Device)", 140, 600, 50, category="gpu_memcpy", bytes=1000)
    builder.add("gpu_user_annotation", "## backward ##", 0, 900, pid=0, tid=7)  # is no work
    found = analysed(builder)
    overlap = found.steps[0].overlap
    assert (overlap.computation, overlap.communication, overlap.overlapped) == (350 * US, 300 * US, 150 * US)
    assert overlap.exposed == 150 * US
    assert analysis.exposed_communication(found) == pytest.approx(0.15)
    assert found.device_total == 500 * US
    kinds = {row.name: row for row in found.kinds if row.device}
    assert {name: row.device // US for name, row in kinds.items()} == {
        "matmul": 200, "elementwise": 100, "communication": 150, "host copy": 50,
    }  # fmt: skip
    assert kinds["communication"].busy == 300 * US
    for table in (found.kinds, found.operators, found.kernels, found.phases):
        assert sum(row.share for row in table) == pytest.approx(1)
        assert sum(row.device for row in table) == found.device_total
    assert found.transfers[0].bytes == 1000
    operators = {row.name: row for row in found.operators}
    assert operators["aten::mm"].device == 200 * US
    assert operators["record_param_comms"].device == 150 * US


def test_phases_pairs_and_self_time(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.operator("aten::linear", 10, 100, **{"Sequence number": 5, "Fwd thread id": 0})
    builder.operator("aten::addmm", 20, 60, **{"Sequence number": 5, "Fwd thread id": 0})
    builder.kernel(GEMM, 30, 40, 100)
    builder.operator("aten::mse_loss", 120, 20, **{"Sequence number": 6, "Fwd thread id": 0})
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    behind = {"Sequence number": 5, "Fwd thread id": 1}
    builder.operator(engine, 200, 100, tid=2, **behind)
    builder.operator("AddmmBackward0", 205, 60, tid=2, **behind)
    builder.operator("aten::mm", 210, 50, tid=2)
    builder.kernel(GEMM, 215, 300, 200, tid=2)
    builder.operator("aten::add_", 270, 25, tid=2)  # the engine sums two gradients
    builder.kernel(ADD, 275, 520, 40, tid=2)
    builder.add("user_annotation", "Optimizer.step#AdamW.step", 400, 100)
    builder.operator("aten::_foreach_mul_", 410, 40, **{"Sequence number": 9, "Fwd thread id": 0})
    builder.kernel(ADD, 420, 600, 30)
    found = analysed(builder)
    rows = {(row.name, row.phase): row for row in found.operators}
    assert rows["aten::linear", "forward"].host == 40 * US
    assert rows["aten::addmm", "forward"].host == 60 * US  # the launch inside is the operator's
    assert rows["aten::addmm", "forward"].device == 100 * US
    assert rows["aten::mse_loss", "loss"].calls == 1
    assert rows["aten::mm", "backward"].device == 200 * US
    assert rows["aten::_foreach_mul_", "optimizer"].device == 30 * US
    phases = {row.name: row.device // US for row in found.phases if row.device}
    assert phases == {"forward": 100, "backward": 240, "optimizer": 30}
    (pair,) = found.pairs
    assert (pair.forward, pair.backward, pair.calls) == ("aten::addmm", "AddmmBackward0", 1)
    assert (pair.forward_host, pair.backward_host) == (60 * US, 60 * US)
    assert (pair.forward_device, pair.backward_device) == (100 * US, 200 * US)
    assert {row.name for row in found.kinds if row.device} == {"matmul", "optimizer", "elementwise"}


def test_copies_with_types_layout_and_line(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.add("python_function", "train.py(42): step", 0, 500)
    builder.add("python_function", "torch/nn/functional.py(10): linear", 5, 400)
    shapes = {"Input type": ["c10::BFloat16", "float"], "Input Dims": [[4, 8], [4, 8]]}
    builder.operator("aten::copy_", 10, 30, **shapes, **{"Input Strides": [[8, 1], [1, 4]]})
    builder.kernel(
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", 15, 50, 70
    )
    builder.operator("aten::copy_", 600, 10, **{"Call stack": "torch/_tensor.py(1): to;data.py(7): load"})
    first, second = analysed(builder).copies
    assert (first.source, first.target, first.contiguous, first.line) == (
        "float", "c10::BFloat16", False, "train.py:42 (step)",
    )  # fmt: skip
    assert (first.elements, first.device, first.calls) == (32, 70 * US, 1)
    assert (second.source, second.contiguous, second.elements) == ("", None, None)
    assert second.line == "data.py:7 (load)"


def test_critical_path(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.add("user_annotation", "## forward ##", 0, 200)
    builder.kernel(GEMM, 100, 110, 300)  # host 0-100, launch 100-110, device 110-410
    builder.kernel(ADD, 120, 415, 185)  # queued gap of 5, device 415-600
    builder.add("cuda_runtime", "cudaDeviceSynchronize", 300, 320)  # returns at 620: 20 after the device
    path = analysed(builder).steps[0].critical_path
    assert path.device == {"matmul": 300 * US, "elementwise": 185 * US}
    assert path.launch == 15 * US
    assert path.synchronisation == 20 * US
    assert path.host == {"forward": 100 * US, "other": 380 * US}
    assert path.total == 1000 * US


def test_launch_into_full_queue_waits_for_device(analysed: Analyse) -> None:
    def injected(*, full: bool) -> dict[str, int]:
        builder = TraceBuilder()
        builder.step(1, 0, 1000)
        builder.kernel(GEMM, 5, 10, 490)
        builder.kernel(GEMM, 20, 500, 400)
        # Launched at 100, accepted when the first kernel is done; or slow in itself on an idle device.
        builder.kernel(ADD, 100 if full else 905, 920, 10, took=401 if full else 60)
        return analysed(builder).steps[0].critical_path.device

    assert injected(full=True) == {"matmul": 490 * US}
    assert injected(full=False) == {}


def test_without_device_or_steps(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.operator("aten::mm", 0, 80)
    builder.operator("aten::add", 80, 20)
    found = analysed(builder)
    assert found.steps[0].number is None
    assert found.steps[0].device is None
    assert {row.name: row.share for row in found.kinds} == {"matmul": 0.8, "elementwise": 0.2}
    assert any("no ProfilerStep" in note for note in found.notes)
    assert any("not measured" in note for note in found.notes)
    assert analysis.idle_share(found) is None
    assert analysis.exposed_communication(found) is None


def test_kernels_without_launch_are_counted(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 100)
    builder.operator("aten::mm", 0, 10)
    builder.add("kernel", GEMM, 50, 20, pid=0, tid=7, device=0, stream=7)
    found = analysed(builder)
    assert found.device_total == 20 * US
    assert found.steps[0].idle.unknown == 50 * US
    assert any("no launch" in note for note in found.notes)


def test_one_step_of_several(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for number in (4, 5):
        builder.step(number, number * 100, 100)
        builder.operator("aten::mm", number * 100 + 1, number)
    trace = read_trace(builder.write(tmp_path / "made.json"))
    assert [row.number for row in analyse([trace]).traces[0].steps] == [4, 5]
    only = analyse([trace], step=5).traces[0]
    assert [row.number for row in only.steps] == [5]
    assert only.operators[0].host == 5 * US
    with pytest.raises(TraceError, match="has no step 6; it has steps 4 to 5"):
        analyse([trace], step=6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.integers(1, 2)), min_size=1, max_size=25)
)
def test_nesting_against_plain_search(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int, int]]
) -> None:
    builder = TraceBuilder()
    kept: list[tuple[int, int, int]] = []
    for start, length, tid in events:  # crossing intervals do not nest
        end = start + length
        crosses = any(t == tid and (s < start < e < end or start < s < end < e) for s, e, t in kept)
        if not crosses and (start, end, tid) not in kept:
            kept.append((start, end, tid))
            builder.operator(f"op {len(kept)}", start, length, tid=tid)
    path = builder.write(tmp_path_factory.mktemp("nest") / "made.json")
    found = tree(read_trace(path).events)
    for position, row in enumerate(found.rows.tolist()):
        start, end, tid = kept[row]
        around = [
            (e - s, -s, other)
            for other, (s, e, t) in enumerate(kept)
            if t == tid and other != row and s <= start and end <= e and (e - s) > (end - start)
        ]
        parent = int(found.parent[position])
        if not around or end == start:
            assert parent < 0 or end == start
            continue
        assert parent >= 0
        assert kept[int(found.rows[parent])] == kept[min(around)[2]]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        # The overlap of crossing ranges belongs to the later one; a range around both loses it once.
        ({"a": (0, 100), "b": (80, 110), "inside": (85, 90)}, {"a": 80, "b": 25, "inside": 5}),
        (
            {"all": (0, 200), "a": (10, 100), "b": (20, 95), "c": (90, 120)},
            {"all": 90, "a": 10, "b": 70, "c": 30},
        ),
    ],
)
def test_every_moment_of_crossing_ranges_counts_once(
    spans: dict[str, tuple[int, int]], expected: dict[str, int], tmp_path: Path
) -> None:
    builder = TraceBuilder()
    for name, (start, end) in spans.items():
        builder.add("user_annotation", name, start, end - start)
    events = read_trace(builder.write(tmp_path / "t.json")).events
    found = tree(events)
    own = {
        events.word("name", row): inner for row, inner in zip(found.rows.tolist(), found.inner, strict=True)
    }
    assert own == {name: length * US for name, length in expected.items()}


def test_short_names() -> None:
    assert short(ADD) == "vectorized_elementwise_kernel [CUDAFunctor_add]"
    assert short("void cudnn::bn_fw<float>(int)") == "cudnn::bn_fw"
    assert len(short("x" * 200)) == 60


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
@pytest.mark.parametrize("name", ["alexnet", "amd_mi250", "cpu_only", "training_one_gpu", "two_ranks_rank-0"])
def test_invariants_of_real_traces(name: str) -> None:
    trace = read_trace(REAL / f"{name}.json.gz")
    found = analyse([trace]).traces[0]
    for row in found.steps:
        assert row.critical_path.total == row.duration
        if row.device is not None:
            assert row.busy + row.idle.total == row.duration
            assert row.overlap.computation + row.overlap.exposed == row.busy
    for table in (found.kinds, found.operators, found.kernels, found.phases):
        if found.device_total:
            assert sum(row.device for row in table) == found.device_total
    assert (tree(trace.events).inner >= 0).all()


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_device_time_against_plain_sweep() -> None:
    path = REAL / "training_one_gpu.json.gz"
    plain = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    work = [e for e in plain if e.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    total, reach = 0, 0
    for start, end in sorted((int(e["ts"] * 1000), int((e["ts"] + e["dur"]) * 1000)) for e in work):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    assert analyse([read_trace(path)]).traces[0].device_total == total


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_pairs_against_profilers_own_links() -> None:
    path = REAL / "training_one_gpu.json.gz"
    timeline = Timeline(read_trace(path))
    plain = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    flows = [event for event in plain if event.get("cat") == "fwdbwd"]
    starts = {flow["id"]: int(flow["ts"] * 1000) for flow in flows if flow["ph"] == "s"}
    ends = {int(flow["ts"] * 1000): flow["id"] for flow in flows if flow["ph"] == "f"}
    ahead, behind = joined(Costs(timeline, timeline.steps))
    calls = timeline.tree
    checked = 0
    for one, other in zip(ahead.tolist(), behind.tolist(), strict=True):
        # The profiler links the node inside the engine's range; backlight links the range.
        inner = other + 1
        link = ends.get(int(calls.start[inner]))
        if link is not None:
            assert starts[link] == calls.start[one]
            checked += 1
    assert checked > 800


@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
@pytest.mark.parametrize("path", sorted(REAL.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
def test_sums_over_steps_are_their_duration(path: Path) -> None:
    rank = analyse([read_trace(path)]).traces[0]
    lengths = {step.number: step.duration for step in rank.steps}  # one row per device
    assert all(step.critical_path.total == step.duration for step in rank.steps)
    assert sum(row.host for row in rank.phases) == rank.host_total == sum(lengths.values())
