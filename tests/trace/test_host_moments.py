"""Host time of the steps: every moment once, over threads, phases and delayed steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.trace.analysis import Analysis, RankAnalysis, analyse, analyse_rank
from backlight.trace.answer import answer
from backlight.trace.reader import read_trace
from backlight.trace.timeline import Timeline
from backlight.trace.trace_diff import diff
from synthetic_traces import REAL, SKIP_REASON, TraceBuilder

Analyse = Callable[[TraceBuilder], RankAnalysis]
US = 1000
ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"


def recorded(number: int, *, behind: bool = False) -> dict[str, int]:
    """Return the arguments of an operator that autograd recorded, or of its node of backward."""
    return {"Sequence number": number, "Fwd thread id": int(behind)}


def phases_of(found: RankAnalysis) -> dict[str, int]:
    return {row.name: row.host // US for row in found.phases if row.host}


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
@pytest.mark.parametrize("path", sorted(REAL.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_phases_of_stored_traces_add_up_to_the_steps(path: Path) -> None:
    found = analyse([read_trace(path)]).traces[0]
    steps = sum({row.number: row.duration for row in found.steps}.values())
    assert steps > 0
    assert found.host_total == steps
    assert sum(row.host for row in found.phases) == steps
    for row in found.steps:
        assert row.critical_path.total == row.duration


Spans = list[tuple[int, int, bool]]
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15), st.booleans()), max_size=8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(spans, spans)
def test_every_moment_of_a_step_has_one_call(
    tmp_path_factory: pytest.TempPathFactory, main: Spans, other: Spans
) -> None:
    builder = TraceBuilder()
    builder.step(1, 5, 40)
    kinds = {}
    for tid, calls in ((1, main), (2, other)):
        for number, (start, length, is_operator) in enumerate(calls):
            name = f"call {tid} {number}"
            kinds[name] = (tid, is_operator)
            builder.add("cpu_op" if is_operator else "user_annotation", name, start, length, tid=tid)
    timeline = Timeline(read_trace(builder.write(tmp_path_factory.mktemp("made") / "made.json")))
    moments, tree = timeline.moments, timeline.tree
    assert moments.start[0] == timeline.steps[0].start
    assert moments.end[-1] == timeline.steps[0].end
    assert (moments.start[1:] == moments.end[:-1]).all()
    for start, call in zip(moments.start.tolist(), moments.call.tolist(), strict=True):
        is_open = (tree.start <= start) & (start < tree.end)
        assert is_open[call]
        # The thread of the steps is in a call throughout, the range of the step.
        assert tree.thread[call] == tree.thread[timeline.step_marks[tree.rows]][0]
        inner = is_open & (tree.thread == tree.thread[call]) & (tree.start > tree.start[call])
        assert not inner.any()


def test_threads_of_backward_have_the_time_in_which_the_loop_waits(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.operator("aten::linear", 0, 300, **recorded(1))
    builder.add("python_function", "torch/autograd/graph.py(1): _engine_run_backward", 300, 500)
    builder.operator(ENGINE, 350, 400, tid=2, **recorded(1, behind=True))
    builder.operator("aten::add", 700, 40)  # the loop works again: a hook on its thread
    builder.operator("aten::pin_memory", 100, 800, tid=3)  # loads data meanwhile
    found = analysed(builder)
    assert phases_of(found) == {"forward": 300, "backward": 360, "other": 340}
    operators = {row.name: (row.calls, row.host // US) for row in found.operators}
    assert operators["aten::add"] == (1, 40)
    assert operators["aten::pin_memory"] == (1, 0)
    assert found.steps[0].critical_path.host == {name: ns * US for name, ns in phases_of(found).items()}


def test_call_that_is_open_at_the_end_of_its_step_is_cut_off(analysed: Analyse) -> None:
    builder = TraceBuilder()
    for number in range(3):
        builder.step(number, 100 * number, 90)
        builder.operator("aten::mm", 100 * number, 60)
        # Ends with the profiler's own work, after the step; the last one long after it.
        builder.add(
            "user_annotation", "Optimizer.step#SGD.step", 100 * number + 70, 25 if number < 2 else 900
        )
    found = analysed(builder)
    assert found.host_total == 270 * US
    assert phases_of(found) == {"other": 210, "optimizer": 60}
    (optimizer,) = found.annotations
    assert optimizer.host == 60 * US


@pytest.mark.parametrize("after", ["backward", "optimizer"])
def test_norms_of_gradients_are_not_forward(analysed: Analyse, after: str) -> None:
    builder = TraceBuilder()
    for number in range(2):
        at = 1000 * number
        builder.step(number, at, 1000)
        builder.operator("aten::detach", at + 5, 10, **recorded(2 * number))  # the forward has begun
        builder.operator("aten::linear", at + 20, 200, **recorded(2 * number))
        builder.operator("aten::addmm", at + 30, 150, **recorded(2 * number))
        builder.operator(ENGINE, at + 300, 200, **recorded(2 * number, behind=True))
        builder.add("user_annotation", "Optimizer.step#SGD.step", at + 600, 100)
        norms = 520 if after == "backward" else 720
        builder.operator("aten::linalg_vector_norm", at + norms, 50, **recorded(2 * number + 2))
    found = analysed(builder)
    rows = {row.name: row.phase for row in found.operators}
    assert rows == {
        "aten::detach": "forward", "aten::linear": "forward", "aten::addmm": "forward", ENGINE: "backward",
        "aten::linalg_vector_norm": "other",
    }  # fmt: skip


def test_second_microbatch_is_forward(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    for number in range(2):
        at = 400 * number
        builder.operator("aten::linear", at + 20, 100, **recorded(number))
        builder.operator("aten::relu", at + 140, 30, **recorded(number + 5))
        builder.operator(ENGINE, at + 200, 150, **recorded(number, behind=True))
    rows = {row.name: (row.phase, row.calls) for row in analysed(builder).operators}
    assert rows["aten::linear"] == ("forward", 2)
    assert rows["aten::relu"] == ("forward", 2)


@pytest.mark.slow
def test_norms_in_a_trace_of_the_installed_profiler(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "trace.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,
    ) as profiler:
        for _ in range(4):
            model(torch.randn(4, 8)).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.norm().item()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    found = analyse([read_trace(path)]).traces[0]
    norms = {row.phase for row in found.operators if row.name == "aten::linalg_vector_norm"}
    assert norms == {"other"}
    assert {row.phase for row in found.operators if row.name == "aten::addmm"} == {"forward"}


def loop(lengths: list[int], *, slow: str = "aten::mm", alternating: bool = False) -> TraceBuilder:
    """Return a loop of steps; of what a step takes beyond 100 microseconds, ``slow`` takes all."""
    builder = TraceBuilder()
    at = 0
    for number, length in enumerate(lengths):
        builder.step(number, at, length)
        late = length - 100
        builder.operator("aten::mm", at, 40 + (late if slow == "aten::mm" else 0))
        builder.operator("aten::add", at + 50 + (late if slow == "aten::mm" else 0), 20)
        for extra in range(5 if alternating and number % 2 else 0):
            builder.operator("aten::relu", at + length - 25 + 5 * extra, 5)
        at += length + 10
    return builder


@pytest.mark.parametrize("slow", ["aten::mm", "python"])
def test_one_preempted_step_of_four_decides_nothing(analysed: Analyse, slow: str) -> None:
    sound, found = analysed(loop([100] * 4)), analysed(loop([100, 100, 1300, 100], slow=slow))
    for name in ("phases", "kinds", "operators"):
        shares = [{row.name: row.share for row in getattr(one, name)} for one in (sound, found)]
        assert shares[0] == shares[1]
    assert [row.number for row in found.steps] == [0, 1, 2, 3]
    assert found.delayed == (2,)
    assert found.host_total == sum(row.host for row in found.phases) == 1600 * US
    assert [row.number for row in found.usual_steps] == [0, 1, 3]
    (note,) = [note for note in found.notes if "step 2" in note]
    assert note == (
        "step 2 took 1.3 ms, 13.0 times the median, 1.2 ms of it more in other: it is in no share"
    )


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([100, 130, 100, 100], {}),  # within the noise
        ([100, 400], {}),  # which of two is the usual one is not known
        ([100, 300, 100, 300, 100, 300], {"alternating": True}),  # two kinds of steps
        ([100, 100, 100, 400] * 6, {}),  # every fourth step waits: a property of the loop
    ],
)
def test_steps_of_several_lengths_all_count(
    analysed: Analyse, lengths: list[int], options: dict[str, bool]
) -> None:
    found = analysed(loop(lengths, **options))
    assert len(found.steps) == len(lengths)
    assert not found.delayed


def test_operator_of_two_phases_is_named_with_its_whole_share(analysed: Analyse) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.operator("aten::mm", 0, 200, **recorded(1))
    builder.operator("aten::add", 250, 300, **recorded(2))
    builder.operator(ENGINE, 600, 300, **recorded(1, behind=True))
    builder.operator("aten::mm", 600, 300)
    (line,) = [
        line for line in answer(Analysis((analysed(builder),), None)).facts if line.startswith("operators")
    ]
    assert line == "operators: aten::mm 50 %, aten::add 30 %"


def test_difference_of_traces_leaves_delayed_steps_out(tmp_path: Path) -> None:
    sides = []
    for number, lengths in enumerate(([100] * 4, [100, 100, 1300, 100])):
        trace = read_trace(loop(lengths).write(tmp_path / f"{number}.json"))
        sides.append(analyse_rank(Timeline(trace), usual=True))
    found = diff(*sides)
    assert found.total == (100 * US, 100 * US)
    assert not any(row.change for row in found.operators)
