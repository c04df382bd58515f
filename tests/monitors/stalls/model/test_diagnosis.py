"""Diagnosis of one rank, from written observations, without any process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backlight.findings.limits import ThresholdError
from backlight.monitors.stalls.model.diagnosis import diagnose, estimate_speed
from backlight.monitors.stalls.model.graph_samples import GraphBuild
from backlight.monitors.stalls.model.observation import Observation
from backlight.monitors.stalls.model.shared_state import Collective, RankStatus, StateSnapshot
from backlight.monitors.stalls.model.stacks import Frame, StackSample, ThreadStack, native_operation
from backlight.monitors.stalls.model.timeouts import StallLimits, is_suspicious, timeout_of
from backlight.records import DiagnosisKind, Phase

LIMITS = StallLimits()
S = 10**9
MAIN = 7
ENGINE = Frame("/lib/torch/autograd/graph.py", 979, "_engine_run_backward")
OURS = Frame("/home/me/ops.py", 22, "LockedFn.backward")
TOP = Frame("/home/me/train.py", 5, "main")


def snapshot(**changes: Any) -> StateSnapshot:
    """A rank in its third backward, silent for 40 s with a timeout of 30 s."""
    base = StateSnapshot(
        taken=1000 * S, pid=4242, rank=0, world_size=1, status=RankStatus.RUNNING,
        main_ident=MAIN, main_tid=4242, heartbeat=960 * S, progress=50, phase=Phase.BACKWARD,
        phase_since=959 * S, step=2, backwards=2, nodes_total=100, nodes_done=40,
        position_hooks=0, row=1, reached=2, expected=4,
        node="LockedFnBackward", node_since=960 * S, node_calls=3, backward_ident=MAIN,
        inside=False, sampler=1000 * S, device=False, distributed=False, timeout_s=None,
        forwards=3, typical=dict.fromkeys(Phase, 0.1),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def samples(
    *frames: Frame, runs_bytecode: bool | None = None, source: str = "sampler", count: int = 4
) -> tuple[StackSample, ...]:
    stack = ThreadStack(MAIN, frames, "MainThread", 4242, runs_bytecode)
    return tuple(StackSample((990 + i) * S, source, (stack,)) for i in range(count))


def observation(state: StateSnapshot | None = None, **changes: Any) -> Observation:
    base = Observation(
        rank=0, snapshots=(state or snapshot(),), samples=samples(OURS, ENGINE, TOP), cpu=0.0, thread_cpu=0.0,
        names=("0.weight", "0.bias", "1.weight", "1.bias"),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_blocked_names_thread_line_and_parameter() -> None:
    found = diagnose(observation(wait="a lock"), LIMITS)
    assert found.kind is DiagnosisKind.BLOCKED
    assert found.claim == (
        "BLOCKED: the main thread waits for a lock in LockedFn.backward, ops.py:22; CPU 0 %; 40 s; "
        "last parameter reached: 0.bias (2 of 4)"
    )
    assert (found.line, found.parameter, found.module) == ("/home/me/ops.py:22", "0.bias", "LockedFn")
    assert found.refuted_if


@pytest.mark.parametrize(
    ("runs_bytecode", "source", "kind"),
    [
        (True, "sampler", DiagnosisKind.SPIN),
        (None, "faulthandler", DiagnosisKind.SPIN),
        (False, "sampler", DiagnosisKind.LONG_OP),
        (None, "sampler", DiagnosisKind.UNKNOWN),
    ],
)
def test_busy_line_is_a_loop_or_a_native_call_or_unknown(
    runs_bytecode: bool | None, source: str, kind: DiagnosisKind
) -> None:
    found = diagnose(
        observation(
            cpu=1.0,
            thread_cpu=1.0,
            samples=samples(OURS, ENGINE, TOP, runs_bytecode=runs_bytecode, source=source),
        ),
        LIMITS,
    )
    assert found.kind is kind


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": samples(OURS, ENGINE, count=2)},
        {"samples": ()},
        {"cpu": None, "thread_cpu": None},
        {"cpu": 0.3, "thread_cpu": 0.3},
    ],
)
def test_too_few_samples_are_unknown(changes: dict[str, Any]) -> None:
    found = diagnose(observation(**{"cpu": 1.0, "thread_cpu": 1.0, **changes}), LIMITS)
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "did not finish in the time given" in found.claim


def test_samples_before_the_last_heartbeat_are_ignored() -> None:
    late = snapshot(heartbeat=995 * S, phase_since=900 * S, timeout_s=2.0)
    found = diagnose(
        observation(late, cpu=1.0, thread_cpu=1.0, samples=samples(OURS, ENGINE, runs_bytecode=True)), LIMITS
    )
    assert found.kind is DiagnosisKind.UNKNOWN


def test_moving_backward_is_slow_with_rate_and_eta() -> None:
    then, between, now = moved(990, 995, 1000)
    then = dataclasses.replace(then, nodes_done=20_000)
    now = dataclasses.replace(now, nodes_done=145_000)
    found = diagnose(observation(now, snapshots=(then, between, now), cpu=1.0), LIMITS)
    assert found.kind is DiagnosisKind.SLOW
    assert "backward 145,000 of 1,000,000 nodes, 12.5k/s, ETA 68 s" in found.claim


@pytest.mark.parametrize("heartbeats", [(1000,), (999, 1000), (993.5, 994, 994.5, 995, 995.5)])
def test_few_heartbeats_before_a_hang_are_not_slow(heartbeats: tuple[float, ...]) -> None:
    snapshots = moved(*heartbeats)
    assert (
        diagnose(observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0), LIMITS)
        is None
    )


def test_heartbeats_are_slow_while_the_silence_is_as_long_as_their_pauses() -> None:
    snapshots = moved(980, 986, 992)
    found = diagnose(observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0), LIMITS)
    assert found.kind is DiagnosisKind.SLOW


def test_thread_that_queues_for_a_processor_is_not_blocked() -> None:
    starved = diagnose(observation(thread_cpu=0.04, cpu=0.04, scheduled=0.9, slices_per_s=30.0), LIMITS)
    waiting = diagnose(
        observation(thread_cpu=0.0, cpu=0.0, scheduled=0.0, slices_per_s=0.0, wait="a lock"), LIMITS
    )
    assert starved.kind is DiagnosisKind.UNKNOWN
    assert waiting.kind is DiagnosisKind.BLOCKED


@pytest.mark.parametrize(
    "frames", [(OURS, ENGINE, TOP), (ENGINE, TOP)], ids=["a line of Python", "native code"]
)
@pytest.mark.parametrize("source", ["sampler", "faulthandler"])
def test_samples_of_a_thread_that_waits_for_a_core_show_nothing(
    frames: tuple[Frame, ...], source: str
) -> None:
    state = snapshot(position_hooks=50, node_since=0 if frames[0] is ENGINE else 960 * S)
    same = {"samples": samples(*frames, runs_bytecode=True, source=source), "scheduled": 0.95}
    for ran in (0.01, 0.2, 0.45):
        starved = diagnose(observation(state, thread_cpu=ran, cpu=ran, **same), LIMITS)
        assert (starved.kind, starved.line) == (DiagnosisKind.UNKNOWN, None)
        assert "it waits for a core most of the time" in starved.claim
    ran_on = diagnose(observation(state, thread_cpu=0.55, cpu=0.55, **same), LIMITS)
    assert ran_on.kind is (DiagnosisKind.LONG_OP if frames[0] is ENGINE else DiagnosisKind.SPIN)


def test_thread_that_pauses_is_unknown() -> None:
    busy = {"thread_cpu": 0.2, "cpu": 0.2, "samples": samples(OURS, ENGINE, TOP, runs_bytecode=True)}
    pausing = diagnose(observation(scheduled=0.25, **busy), LIMITS)
    assert pausing.kind is DiagnosisKind.UNKNOWN
    assert "neither waits nor computes" in pausing.claim


def test_starved_phase_names_no_line_in_every_sample() -> None:
    state = snapshot(phase=Phase.FORWARD, heartbeat=500 * S, phase_since=500 * S, node_since=0)
    for scheduled, when in ((0.9, "now at train.py:5"), (0.3, "in every sample at train.py:5")):
        found = diagnose(
            observation(state, samples=samples(TOP), thread_cpu=0.25, cpu=0.25, scheduled=scheduled), LIMITS
        )
        assert when in found.claim


def test_thread_that_competes_for_the_interpreter_lock_is_not_blocked() -> None:
    found = diagnose(
        observation(thread_cpu=0.03, cpu=1.0, scheduled=0.05, slices_per_s=180.0, wait="a lock"), LIMITS
    )
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "starved of the interpreter lock" in found.claim


def moved(*heartbeats: float) -> tuple[StateSnapshot, ...]:
    """Snapshots of a backward that began at 900 s, one heartbeat apart, all but the last at heartbeats."""
    states = [
        snapshot(
            taken=int(at * S),
            heartbeat=int(at * S),
            progress=50 + n,
            phase_since=900 * S,
            nodes_total=1_000_000,
        )
        for n, at in enumerate(heartbeats)
    ]
    return (*states[:-1], dataclasses.replace(states[-1], taken=1000 * S))


def test_speed_without_a_position_is_unknown() -> None:
    assert estimate_speed([snapshot(nodes_done=0)]) == (None, None)


def test_backward_within_its_timeout_has_no_diagnosis() -> None:
    assert diagnose(observation(snapshot(heartbeat=1000 * S, phase_since=990 * S)), LIMITS) is None
    assert diagnose(observation(snapshot(heartbeat=990 * S, phase_since=980 * S)), LIMITS) is None


def test_native_code_is_one_operation_only_between_close_hooks() -> None:
    busy = {"cpu": 1.0, "thread_cpu": 1.0, "samples": samples(ENGINE, TOP)}
    apart = diagnose(observation(snapshot(node_since=0), **busy), LIMITS)
    close = diagnose(observation(snapshot(node_since=0, position_hooks=50), **busy), LIMITS)
    assert apart.kind is DiagnosisKind.UNKNOWN
    assert close.kind is DiagnosisKind.LONG_OP


def test_backward_inside_a_custom_function_is_not_one_operation() -> None:
    busy = {"cpu": 1.0, "thread_cpu": 1.0, "samples": samples(ENGINE, TOP)}
    inside = diagnose(
        observation(snapshot(position_hooks=50, node="CheckpointFunctionBackward"), **busy), LIMITS
    )
    assert inside.kind is DiagnosisKind.UNKNOWN
    again = GraphBuild(0, 7, ((3, 0), (90_000, 0)), ((OURS,),))
    made = diagnose(observation(snapshot(node_since=0, position_hooks=50), graph_build=again, **busy), LIMITS)
    assert made.kind is DiagnosisKind.UNKNOWN


def test_slow_names_the_line_that_made_the_nodes_if_known() -> None:
    snapshots = moved(980, 986, 992)
    moving = observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0)
    unknown = diagnose(moving, LIMITS)
    assert unknown.claim.endswith("; the line that made the nodes is not known")
    build = GraphBuild(0, 100, tuple((10 * i, 0) for i in range(1, 10)), ((OURS,),))
    known = diagnose(dataclasses.replace(moving, graph_build=build), LIMITS)
    assert known.kind is DiagnosisKind.SLOW
    assert known.line == "/home/me/ops.py:22"
    assert "of the nodes come from ops.py:22, by 9 samples of forward" in known.claim


def test_native_operation_is_read_from_native_frames() -> None:
    names = (
        "mkl_blas",
        "at::native::mm",
        "torch::autograd::generated::MmBackward0::apply(vec&&)",
        "start_thread",
    )
    stack = ThreadStack(MAIN, (ENGINE, TOP), native=tuple(Frame("libtorch.so", 0, n) for n in names))
    assert native_operation(StackSample(0, "py-spy", (stack,))) == "MmBackward0"
    assert native_operation(StackSample(0, "py-spy", (dataclasses.replace(stack, frames=(TOP,)),))) is None


def test_waiting_for_a_device_is_not_blocked() -> None:
    found = diagnose(observation(snapshot(device=True, node_since=0), samples=samples(ENGINE, TOP)), LIMITS)
    assert found.kind is DiagnosisKind.UNKNOWN


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER])
def test_phase_outside_backward_is_named(phase: Phase) -> None:
    state = snapshot(phase=phase, heartbeat=500 * S, phase_since=500 * S, node_since=0)
    found = diagnose(observation(state, samples=samples(TOP)), LIMITS)
    assert (found.kind, found.phase) == (DiagnosisKind.PHASE, phase)


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.CHECKPOINT])
@pytest.mark.parametrize("stall", [None, 1.0])
def test_evaluation_and_checkpoints_have_no_diagnosis(phase: Phase, stall: float | None) -> None:
    state = snapshot(phase=phase, heartbeat=0, phase_since=0, timeout_s=stall)
    assert diagnose(observation(state), LIMITS) is None


@pytest.mark.parametrize(
    "file",
    [
        "/x/torch/_dynamo/convert_frame.py",
        "/x/torch/_inductor/codecache.py",
        "/x/torch/_inductor/graph.py",
        "/x/torch/_inductor/fx_passes/post_grad.py",
        "/x/torch/fx/experimental/proxy_tensor.py",
    ],
)
def test_compilation_has_no_diagnosis(file: str) -> None:
    state = snapshot(phase=Phase.FORWARD, heartbeat=0, phase_since=0, timeout_s=1.0)
    assert (
        diagnose(
            observation(state, samples=samples(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, "f"), TOP)),
            LIMITS,
        )
        is None
    )


@pytest.mark.parametrize(
    ("file", "function", "silent"),
    [
        ("/x/torch/_inductor/compile_fx.py", "compile_fx_backward", True),
        ("/x/torch/_inductor/compile_fx.py", "cudagraphify.<locals>.run", False),
        ("/x/torch/_inductor/output_code.py", "CompiledFxGraph.__call__", False),
    ],
)
def test_backward_that_compiles_has_no_diagnosis_and_compiled_code_has(
    file: str, function: str, silent: bool
) -> None:
    stacks = samples(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, function), ENGINE, TOP)
    assert (diagnose(observation(samples=stacks, wait="a lock"), LIMITS) is None) is silent


def test_dead_and_stopped_precede_other_diagnoses() -> None:
    dead = diagnose(observation(ended="killed by SIGKILL"), LIMITS)
    stopped = diagnose(observation(stopped=True), LIMITS)
    assert dead.claim.startswith("DEAD: rank 0 killed by SIGKILL at step 2, in backward")
    assert dead.parameter == "0.bias"
    later = diagnose(observation(snapshot(phase=Phase.OTHER), ended="killed by SIGKILL"), LIMITS)
    assert later.claim == "DEAD: rank 0 killed by SIGKILL at step 2, between phases"
    assert later.parameter is None  # that backward is over
    assert stopped.kind is DiagnosisKind.STOPPED


def test_wait_in_a_collective_is_blocked() -> None:
    call = Collective(1, 17, 2, 3, 960 * S, 0, "all_reduce(16 float32) #17")
    state = snapshot(phase=Phase.OTHER, heartbeat=900 * S, inside=True, collectives=(call,), world_size=2)
    found = diagnose(observation(state, samples=samples(TOP)), LIMITS)
    assert found.waits
    assert "waits in all_reduce(16 float32) #17, called at train.py:5 in main" in found.claim


def test_timeout_follows_the_run_and_backward_always_has_one() -> None:
    first = snapshot(backwards=0, forwards=0, step=0, typical=dict.fromkeys(Phase, 0.0))
    assert timeout_of(first, LIMITS) == LIMITS.floor
    assert timeout_of(snapshot(typical=dict.fromkeys(Phase, 20.0)), LIMITS) == pytest.approx(200.0)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.OTHER):
        assert timeout_of(dataclasses.replace(first, phase=phase), LIMITS) is None
        assert timeout_of(snapshot(phase=phase), LIMITS) is not None
    assert (
        timeout_of(dataclasses.replace(first, phase=Phase.OTHER, inside=True), LIMITS)
        == LIMITS.floor_collective
    )
    assert timeout_of(snapshot(timeout_s=3.0), LIMITS) == pytest.approx(3.0)
    assert timeout_of(dataclasses.replace(first, phase=Phase.OTHER, timeout_s=3.0), LIMITS) is None
    assert is_suspicious(snapshot(), LIMITS)
    assert not is_suspicious(snapshot(heartbeat=999 * S, phase_since=999 * S), LIMITS)


def test_thresholds_are_refused_with_the_way_out() -> None:
    with pytest.raises(ThresholdError, match=r"no threshold 'flor'; did you mean 'floor'"):
        LIMITS.override({"flor": 1})
    assert LIMITS.override({"floor": 5}).floor == pytest.approx(5.0)
