"""Verdicts on one process, from observations that are written down, without any process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backlight.findings.limits import ThresholdError
from backlight.monitors.stalls.model.diagnosis import diagnose, native_operation, speed
from backlight.monitors.stalls.model.graph_samples import GraphBuild
from backlight.monitors.stalls.model.observation import Observation
from backlight.monitors.stalls.model.shared_state import Collective, State, StateSnapshot
from backlight.monitors.stalls.model.stacks import Frame, StackSample, ThreadStack
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.timeouts import is_suspicious, timeout_s
from backlight.records import DiagnosisKind, Phase

LIMITS = Thresholds()
S = 10**9
MAIN = 7
ENGINE = Frame("/lib/torch/autograd/graph.py", 979, "_engine_run_backward")
OURS = Frame("/home/me/ops.py", 22, "LockedFn.backward")
TOP = Frame("/home/me/train.py", 5, "main")


def board(**changes: Any) -> StateSnapshot:
    """A rank in its third backward, which has not moved for 40 s; it allows 30."""
    base = StateSnapshot(
        taken=1000 * S, pid=4242, rank=0, world=1, state=State.RUNNING, main_ident=MAIN, main_tid=4242,
        heartbeat=960 * S, progress=50, phase=Phase.BACKWARD, phase_since=959 * S, step=2, backwards=2,
        nodes_total=100, nodes_done=40, hooks=0, row=1, reached=2, expected=4, node="LockedFnBackward",
        node_since=960 * S, node_calls=3, backward_ident=MAIN, inside=False, sampler=1000 * S, device=False,
        distributed=False, stall=None, forwards=3, typical=dict.fromkeys(Phase, 0.1),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def samples(
    *frames: Frame, runs_bytecode: bool | None = None, source: str = "sampler", count: int = 4
) -> tuple[StackSample, ...]:
    stack = ThreadStack(MAIN, frames, "MainThread", 4242, runs_bytecode)
    return tuple(StackSample((990 + i) * S, source, (stack,)) for i in range(count))


def observation(state: StateSnapshot | None = None, **changes: Any) -> Observation:
    base = Observation(
        rank=0, snapshots=(state or board(),), samples=samples(OURS, ENGINE, TOP), cpu=0.0, own_cpu=0.0,
        names=("0.weight", "0.bias", "1.weight", "1.bias"),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_blocked_names_thread_line_and_parameter() -> None:
    found = diagnose(observation(wait="a lock"), LIMITS)
    assert found is not None
    assert found.kind is DiagnosisKind.BLOCKED
    assert found.claim == (
        "BLOCKED: the main thread waits for a lock in LockedFn.backward, ops.py:22; CPU 0 %; 40 s; "
        "last parameter reached: 0.bias (2 of 4)"
    )
    assert (found.line, found.parameter, found.module) == ("/home/me/ops.py:22", "0.bias", "LockedFn")
    assert found.refuted_if


@pytest.mark.parametrize(
    ("runs_bytecode", "source", "verdict"),
    [
        (True, "sampler", DiagnosisKind.SPIN),
        (None, "faulthandler", DiagnosisKind.SPIN),
        (False, "sampler", DiagnosisKind.LONG_OP),
        (None, "sampler", DiagnosisKind.UNKNOWN),
    ],
)
def test_a_busy_line_is_a_loop_or_one_native_call_or_undecided(
    runs_bytecode: bool | None, source: str, verdict: DiagnosisKind
) -> None:
    found = diagnose(
        observation(
            cpu=1.0,
            own_cpu=1.0,
            samples=samples(OURS, ENGINE, TOP, runs_bytecode=runs_bytecode, source=source),
        ),
        LIMITS,
    )
    assert found is not None
    assert found.kind is verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": samples(OURS, ENGINE, count=2)},
        {"samples": ()},
        {"cpu": None, "own_cpu": None},
        {"cpu": 0.3, "own_cpu": 0.3},
    ],
)
def test_too_little_is_unknown(changes: dict[str, Any]) -> None:
    found = diagnose(observation(**{"cpu": 1.0, "own_cpu": 1.0, **changes}), LIMITS)
    assert found is not None
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "did not finish in the time given" in found.claim


def test_looks_of_before_the_last_beat_decide_nothing() -> None:
    late = board(heartbeat=995 * S, phase_since=900 * S, stall=2.0)
    found = diagnose(
        observation(late, cpu=1.0, own_cpu=1.0, samples=samples(OURS, ENGINE, runs_bytecode=True)), LIMITS
    )
    assert found is not None
    assert found.kind is DiagnosisKind.UNKNOWN


def test_moving_is_slow_with_rate_and_eta() -> None:
    then, between, now = moved(990, 995, 1000)
    then = dataclasses.replace(then, nodes_done=20_000)
    now = dataclasses.replace(now, nodes_done=145_000)
    found = diagnose(observation(now, snapshots=(then, between, now), cpu=1.0), LIMITS)
    assert found is not None
    assert found.kind is DiagnosisKind.SLOW
    assert "backward 145,000 of 1,000,000 nodes, 12.5k/s, ETA 68 s" in found.claim


@pytest.mark.parametrize("heartbeats", [(1000,), (999, 1000), (993.5, 994, 994.5, 995, 995.5)])
def test_a_few_beats_before_a_standstill_are_not_slow(heartbeats: tuple[float, ...]) -> None:
    snapshots = moved(*heartbeats)
    assert (
        diagnose(observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0), LIMITS)
        is None
    )


def test_the_same_beats_are_slow_once_the_silence_is_no_longer_than_their_pauses() -> None:
    snapshots = moved(980, 986, 992)
    found = diagnose(observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0), LIMITS)
    assert found is not None
    assert found.kind is DiagnosisKind.SLOW


def test_a_thread_that_queues_for_a_processor_is_not_blocked_and_one_that_waits_is() -> None:
    starved = diagnose(observation(own_cpu=0.04, cpu=0.04, wanted=0.9, turns=30.0), LIMITS)
    waiting = diagnose(observation(own_cpu=0.0, cpu=0.0, wanted=0.0, turns=0.0, wait="a lock"), LIMITS)
    assert starved is not None
    assert starved.kind is DiagnosisKind.UNKNOWN
    assert waiting is not None
    assert waiting.kind is DiagnosisKind.BLOCKED


def test_a_thread_that_computes_on_a_busy_machine_spins_though_it_gets_little() -> None:
    busy = {"own_cpu": 0.2, "cpu": 0.2, "samples": samples(OURS, ENGINE, TOP, runs_bytecode=True)}
    starved = diagnose(observation(wanted=0.95, **busy), LIMITS)
    pausing = diagnose(observation(wanted=0.25, **busy), LIMITS)
    assert starved is not None
    assert starved.kind is DiagnosisKind.SPIN
    assert pausing is not None
    assert pausing.kind is DiagnosisKind.UNKNOWN


def test_a_thread_that_competes_for_the_interpreter_lock_is_not_blocked() -> None:
    found = diagnose(observation(own_cpu=0.03, cpu=1.0, wanted=0.05, turns=180.0, wait="a lock"), LIMITS)
    assert found is not None
    assert found.kind is DiagnosisKind.UNKNOWN
    assert "keep the interpreter lock from it" in found.claim


def moved(*heartbeats: float) -> tuple[StateSnapshot, ...]:
    """Readings of a backward that began at 900 s, each with one beat more; all but the last are at beats."""
    states = [
        board(
            taken=int(at * S),
            heartbeat=int(at * S),
            progress=50 + n,
            phase_since=900 * S,
            nodes_total=1_000_000,
        )
        for n, at in enumerate(heartbeats)
    ]
    return (*states[:-1], dataclasses.replace(states[-1], taken=1000 * S))


def test_speed_without_a_position_is_not_known() -> None:
    assert speed([board(nodes_done=0)]) == (None, None)


def test_a_backward_within_its_patience_is_nobodys_business() -> None:
    assert diagnose(observation(board(heartbeat=1000 * S, phase_since=990 * S)), LIMITS) is None
    assert diagnose(observation(board(heartbeat=990 * S, phase_since=980 * S)), LIMITS) is None


def test_native_code_without_hooks_is_undecided_and_with_close_hooks_one_operation() -> None:
    busy = {"cpu": 1.0, "own_cpu": 1.0, "samples": samples(ENGINE, TOP)}
    apart = diagnose(observation(board(node_since=0), **busy), LIMITS)
    close = diagnose(observation(board(node_since=0, hooks=50), **busy), LIMITS)
    assert apart is not None
    assert apart.kind is DiagnosisKind.UNKNOWN
    assert close is not None
    assert close.kind is DiagnosisKind.LONG_OP


def test_a_backward_inside_a_custom_function_is_not_taken_for_one_operation() -> None:
    busy = {"cpu": 1.0, "own_cpu": 1.0, "samples": samples(ENGINE, TOP)}
    inside = diagnose(observation(board(hooks=50, node="CheckpointFunctionBackward"), **busy), LIMITS)
    assert inside is not None
    assert inside.kind is DiagnosisKind.UNKNOWN
    again = GraphBuild(0, 7, ((3, 0), (90_000, 0)), ((OURS,),))
    made = diagnose(observation(board(node_since=0, hooks=50), graph_build=again, **busy), LIMITS)
    assert made is not None
    assert made.kind is DiagnosisKind.UNKNOWN


def test_slow_says_which_line_made_the_nodes_or_that_it_is_not_known() -> None:
    snapshots = moved(980, 986, 992)
    is_moving = observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0)
    unknown = diagnose(is_moving, LIMITS)
    assert unknown is not None
    assert unknown.claim.endswith("; which line made the nodes is not known")
    has_samples = GraphBuild(0, 100, tuple((10 * i, 0) for i in range(1, 10)), ((OURS,),))
    known = diagnose(dataclasses.replace(is_moving, graph_build=has_samples), LIMITS)
    assert known is not None
    assert known.kind is DiagnosisKind.SLOW
    assert known.line == "/home/me/ops.py:22"
    assert "of the nodes come from ops.py:22, by 9 looks at forward" in known.claim


def test_the_node_at_work_is_read_from_native_frames() -> None:
    native = (
        "mkl_blas",
        "at::native::mm",
        "torch::autograd::generated::MmBackward0::apply(vec&&)",
        "start_thread",
    )
    stack = ThreadStack(MAIN, (ENGINE, TOP), native=native)
    assert native_operation(StackSample(0, "py-spy", (stack,))) == "MmBackward0"
    assert native_operation(StackSample(0, "py-spy", (dataclasses.replace(stack, frames=(TOP,)),))) is None


def test_waiting_for_a_device_is_not_called_blocked() -> None:
    found = diagnose(observation(board(device=True, node_since=0), samples=samples(ENGINE, TOP)), LIMITS)
    assert found is not None
    assert found.kind is DiagnosisKind.UNKNOWN


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER])
def test_another_phase_is_named(phase: Phase) -> None:
    state = board(phase=phase, heartbeat=500 * S, phase_since=500 * S, node_since=0)
    found = diagnose(observation(state, samples=samples(TOP)), LIMITS)
    assert found is not None
    assert (found.kind, found.phase) == (DiagnosisKind.PHASE, phase)


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.CHECKPOINT])
@pytest.mark.parametrize("stall", [None, 1.0])
def test_evaluation_and_checkpoints_are_exempt(phase: Phase, stall: float | None) -> None:
    state = board(phase=phase, heartbeat=0, phase_since=0, stall=stall)
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
def test_compilation_is_exempt(file: str) -> None:
    state = board(phase=Phase.FORWARD, heartbeat=0, phase_since=0, stall=1.0)
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
def test_backward_that_compiles_is_exempt_and_one_that_runs_compiled_code_is_not(
    file: str, function: str, silent: bool
) -> None:
    stacks = samples(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, function), ENGINE, TOP)
    assert (diagnose(observation(samples=stacks, wait="a lock"), LIMITS) is None) is silent


def test_dead_and_stopped_come_first() -> None:
    dead = diagnose(observation(ended="killed by SIGKILL"), LIMITS)
    stopped = diagnose(observation(stopped=True), LIMITS)
    assert dead is not None
    assert dead.claim.startswith("DEAD: rank 0 killed by SIGKILL at step 2, in backward")
    assert dead.parameter == "0.bias"
    later = diagnose(observation(board(phase=Phase.OTHER), ended="killed by SIGKILL"), LIMITS)
    assert later is not None
    assert later.claim == "DEAD: rank 0 killed by SIGKILL at step 2, between phases"
    assert later.parameter is None  # that backward is over
    assert stopped is not None
    assert stopped.kind is DiagnosisKind.STOPPED


def test_a_collective_is_waited_in() -> None:
    call = Collective(1, 17, 2, 3, 960 * S, 0, "all_reduce(16 float32) #17")
    state = board(phase=Phase.OTHER, heartbeat=900 * S, inside=True, collectives=(call,), world=2)
    found = diagnose(observation(state, samples=samples(TOP)), LIMITS)
    assert found is not None
    assert found.waits
    assert "waits in all_reduce(16 float32) #17, called at train.py:5 in main" in found.claim


def test_patience_follows_the_run_and_never_exempts_backward() -> None:
    first = board(backwards=0, forwards=0, step=0, typical=dict.fromkeys(Phase, 0.0))
    assert timeout_s(first, LIMITS) == LIMITS.floor
    assert timeout_s(board(typical=dict.fromkeys(Phase, 20.0)), LIMITS) == pytest.approx(200.0)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.OTHER):
        assert timeout_s(dataclasses.replace(first, phase=phase), LIMITS) is None
        assert timeout_s(board(phase=phase), LIMITS) is not None
    assert (
        timeout_s(dataclasses.replace(first, phase=Phase.OTHER, inside=True), LIMITS)
        == LIMITS.floor_collective
    )
    assert timeout_s(board(stall=3.0), LIMITS) == pytest.approx(3.0)
    assert timeout_s(dataclasses.replace(first, phase=Phase.OTHER, stall=3.0), LIMITS) is None
    assert is_suspicious(board(), LIMITS)
    assert not is_suspicious(board(heartbeat=999 * S, phase_since=999 * S), LIMITS)


def test_thresholds_are_refused_with_the_way_out() -> None:
    with pytest.raises(ThresholdError, match=r"no threshold 'flor'; nearest: floor"):
        LIMITS.override({"flor": 1})
    assert LIMITS.override({"floor": 5}).floor == pytest.approx(5.0)
