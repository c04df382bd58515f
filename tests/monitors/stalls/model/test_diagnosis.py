"""Verdicts on one process, from observations that are written down, without any process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backlight.findings.thresholds import ThresholdError
from backlight.monitors.stalls.model.diagnosis import judge, native_operation, speed
from backlight.monitors.stalls.model.graph_samples import Making
from backlight.monitors.stalls.model.observation import View
from backlight.monitors.stalls.model.shared_state import BoardState, Collective, State
from backlight.monitors.stalls.model.stacks import Frame, Look, ThreadStack
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.timeouts import patience, suspicious
from backlight.records import Phase, Verdict

LIMITS = Thresholds()
S = 10**9
MAIN = 7
ENGINE = Frame("/lib/torch/autograd/graph.py", 979, "_engine_run_backward")
OURS = Frame("/home/me/ops.py", 22, "LockedFn.backward")
TOP = Frame("/home/me/train.py", 5, "main")


def board(**changes: Any) -> BoardState:
    """A rank in its third backward, which has not moved for 40 s; it allows 30."""
    base = BoardState(
        taken=1000 * S, pid=4242, rank=0, world=1, state=State.RUNNING, main_ident=MAIN, main_tid=4242,
        beat=960 * S, progress=50, phase=Phase.BACKWARD, phase_since=959 * S, step=2, backwards=2,
        nodes_total=100, nodes_done=40, hooks=0, row=1, reached=2, expected=4, node="LockedFnBackward",
        node_since=960 * S, node_calls=3, backward_ident=MAIN, inside=False, witness=1000 * S, device=False,
        distributed=False, stall=None, forwards=3, typical=dict.fromkeys(Phase, 0.1),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def looks(
    *frames: Frame, turn: bool | None = None, source: str = "witness", count: int = 4
) -> tuple[Look, ...]:
    stack = ThreadStack(MAIN, frames, "MainThread", 4242, turn)
    return tuple(Look((990 + i) * S, source, (stack,)) for i in range(count))


def view(state: BoardState | None = None, **changes: Any) -> View:
    base = View(
        rank=0, boards=(state or board(),), looks=looks(OURS, ENGINE, TOP), cpu=0.0, own_cpu=0.0,
        names=("0.weight", "0.bias", "1.weight", "1.bias"),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_blocked_names_thread_line_and_parameter() -> None:
    found = judge(view(wait="a lock"), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.BLOCKED
    assert found.claim == (
        "BLOCKED: the main thread waits for a lock in LockedFn.backward, ops.py:22; CPU 0 %; 40 s; "
        "last parameter reached: 0.bias (2 of 4)"
    )
    assert (found.line, found.parameter, found.module) == ("/home/me/ops.py:22", "0.bias", "LockedFn")
    assert found.refuted_if


@pytest.mark.parametrize(
    ("turn", "source", "verdict"),
    [
        (True, "witness", Verdict.SPIN),
        (None, "faulthandler", Verdict.SPIN),
        (False, "witness", Verdict.LONG_OP),
        (None, "witness", Verdict.UNKNOWN),
    ],
)
def test_a_busy_line_is_a_loop_or_one_native_call_or_undecided(
    turn: bool | None, source: str, verdict: Verdict
) -> None:
    found = judge(
        view(cpu=1.0, own_cpu=1.0, looks=looks(OURS, ENGINE, TOP, turn=turn, source=source)), LIMITS
    )
    assert found is not None
    assert found.verdict is verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"looks": looks(OURS, ENGINE, count=2)},
        {"looks": ()},
        {"cpu": None, "own_cpu": None},
        {"cpu": 0.3, "own_cpu": 0.3},
    ],
)
def test_too_little_is_unknown(changes: dict[str, Any]) -> None:
    found = judge(view(**{"cpu": 1.0, "own_cpu": 1.0, **changes}), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.UNKNOWN
    assert "did not finish in the time given" in found.claim


def test_looks_of_before_the_last_beat_decide_nothing() -> None:
    late = board(beat=995 * S, phase_since=900 * S, stall=2.0)
    found = judge(view(late, cpu=1.0, own_cpu=1.0, looks=looks(OURS, ENGINE, turn=True)), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.UNKNOWN


def test_moving_is_slow_with_rate_and_eta() -> None:
    then, between, now = moved(990, 995, 1000)
    then = dataclasses.replace(then, nodes_done=20_000)
    now = dataclasses.replace(now, nodes_done=145_000)
    found = judge(view(now, boards=(then, between, now), cpu=1.0), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.SLOW
    assert "backward 145,000 of 1,000,000 nodes, 12.5k/s, ETA 68 s" in found.claim


@pytest.mark.parametrize("beats", [(1000,), (999, 1000), (993.5, 994, 994.5, 995, 995.5)])
def test_a_few_beats_before_a_standstill_are_not_slow(beats: tuple[float, ...]) -> None:
    boards = moved(*beats)
    assert judge(view(boards[-1], boards=boards[-1:], history=boards, cpu=1.0), LIMITS) is None


def test_the_same_beats_are_slow_once_the_silence_is_no_longer_than_their_pauses() -> None:
    boards = moved(980, 986, 992)
    found = judge(view(boards[-1], boards=boards[-1:], history=boards, cpu=1.0), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.SLOW


def test_a_thread_that_queues_for_a_processor_is_not_blocked_and_one_that_waits_is() -> None:
    starved = judge(view(own_cpu=0.04, cpu=0.04, wanted=0.9, turns=30.0), LIMITS)
    waiting = judge(view(own_cpu=0.0, cpu=0.0, wanted=0.0, turns=0.0, wait="a lock"), LIMITS)
    assert starved is not None
    assert starved.verdict is Verdict.UNKNOWN
    assert waiting is not None
    assert waiting.verdict is Verdict.BLOCKED


def test_a_thread_that_computes_on_a_busy_machine_spins_though_it_gets_little() -> None:
    busy = {"own_cpu": 0.2, "cpu": 0.2, "looks": looks(OURS, ENGINE, TOP, turn=True)}
    starved = judge(view(wanted=0.95, **busy), LIMITS)
    pausing = judge(view(wanted=0.25, **busy), LIMITS)
    assert starved is not None
    assert starved.verdict is Verdict.SPIN
    assert pausing is not None
    assert pausing.verdict is Verdict.UNKNOWN


def test_a_thread_that_competes_for_the_interpreter_lock_is_not_blocked() -> None:
    found = judge(view(own_cpu=0.03, cpu=1.0, wanted=0.05, turns=180.0, wait="a lock"), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.UNKNOWN
    assert "keep the interpreter lock from it" in found.claim


def moved(*beats: float) -> tuple[BoardState, ...]:
    """Readings of a backward that began at 900 s, each with one beat more; all but the last are at beats."""
    states = [
        board(
            taken=int(at * S), beat=int(at * S), progress=50 + n, phase_since=900 * S, nodes_total=1_000_000
        )
        for n, at in enumerate(beats)
    ]
    return (*states[:-1], dataclasses.replace(states[-1], taken=1000 * S))


def test_speed_without_a_position_is_not_known() -> None:
    assert speed([board(nodes_done=0)]) == (None, None)


def test_a_backward_within_its_patience_is_nobodys_business() -> None:
    assert judge(view(board(beat=1000 * S, phase_since=990 * S)), LIMITS) is None
    assert judge(view(board(beat=990 * S, phase_since=980 * S)), LIMITS) is None


def test_native_code_without_hooks_is_undecided_and_with_close_hooks_one_operation() -> None:
    busy = {"cpu": 1.0, "own_cpu": 1.0, "looks": looks(ENGINE, TOP)}
    apart = judge(view(board(node_since=0), **busy), LIMITS)
    close = judge(view(board(node_since=0, hooks=50), **busy), LIMITS)
    assert apart is not None
    assert apart.verdict is Verdict.UNKNOWN
    assert close is not None
    assert close.verdict is Verdict.LONG_OP


def test_a_backward_inside_a_custom_function_is_not_taken_for_one_operation() -> None:
    busy = {"cpu": 1.0, "own_cpu": 1.0, "looks": looks(ENGINE, TOP)}
    inside = judge(view(board(hooks=50, node="CheckpointFunctionBackward"), **busy), LIMITS)
    assert inside is not None
    assert inside.verdict is Verdict.UNKNOWN
    again = Making(0, 7, ((3, 0), (90_000, 0)), ((OURS,),))
    made = judge(view(board(node_since=0, hooks=50), making=again, **busy), LIMITS)
    assert made is not None
    assert made.verdict is Verdict.UNKNOWN


def test_slow_says_which_line_made_the_nodes_or_that_it_is_not_known() -> None:
    boards = moved(980, 986, 992)
    moving = view(boards[-1], boards=boards[-1:], history=boards, cpu=1.0)
    unknown = judge(moving, LIMITS)
    assert unknown is not None
    assert unknown.claim.endswith("; which line made the nodes is not known")
    looked = Making(0, 100, tuple((10 * i, 0) for i in range(1, 10)), ((OURS,),))
    known = judge(dataclasses.replace(moving, making=looked), LIMITS)
    assert known is not None
    assert known.verdict is Verdict.SLOW
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
    assert native_operation(Look(0, "py-spy", (stack,))) == "MmBackward0"
    assert native_operation(Look(0, "py-spy", (dataclasses.replace(stack, frames=(TOP,)),))) is None


def test_waiting_for_a_device_is_not_called_blocked() -> None:
    found = judge(view(board(device=True, node_since=0), looks=looks(ENGINE, TOP)), LIMITS)
    assert found is not None
    assert found.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER])
def test_another_phase_is_named(phase: Phase) -> None:
    state = board(phase=phase, beat=500 * S, phase_since=500 * S, node_since=0)
    found = judge(view(state, looks=looks(TOP)), LIMITS)
    assert found is not None
    assert (found.verdict, found.phase) == (Verdict.PHASE, phase)


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.CHECKPOINT])
@pytest.mark.parametrize("stall", [None, 1.0])
def test_evaluation_and_checkpoints_are_exempt(phase: Phase, stall: float | None) -> None:
    state = board(phase=phase, beat=0, phase_since=0, stall=stall)
    assert judge(view(state), LIMITS) is None


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
    state = board(phase=Phase.FORWARD, beat=0, phase_since=0, stall=1.0)
    assert (
        judge(view(state, looks=looks(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, "f"), TOP)), LIMITS)
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
    stacks = looks(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, function), ENGINE, TOP)
    assert (judge(view(looks=stacks, wait="a lock"), LIMITS) is None) is silent


def test_dead_and_stopped_come_first() -> None:
    dead = judge(view(ended="killed by SIGKILL"), LIMITS)
    stopped = judge(view(stopped=True), LIMITS)
    assert dead is not None
    assert dead.claim.startswith("DEAD: rank 0 killed by SIGKILL at step 2, in backward")
    assert dead.parameter == "0.bias"
    later = judge(view(board(phase=Phase.OTHER), ended="killed by SIGKILL"), LIMITS)
    assert later is not None
    assert later.claim == "DEAD: rank 0 killed by SIGKILL at step 2, between phases"
    assert later.parameter is None  # that backward is over
    assert stopped is not None
    assert stopped.verdict is Verdict.STOPPED


def test_a_collective_is_waited_in() -> None:
    call = Collective(1, 17, 2, 3, 960 * S, 0, "all_reduce(16 float32) #17")
    state = board(phase=Phase.OTHER, beat=900 * S, inside=True, collectives=(call,), world=2)
    found = judge(view(state, looks=looks(TOP)), LIMITS)
    assert found is not None
    assert found.waits
    assert "waits in all_reduce(16 float32) #17, called at train.py:5 in main" in found.claim


def test_patience_follows_the_run_and_never_exempts_backward() -> None:
    first = board(backwards=0, forwards=0, step=0, typical=dict.fromkeys(Phase, 0.0))
    assert patience(first, LIMITS) == LIMITS.floor
    assert patience(board(typical=dict.fromkeys(Phase, 20.0)), LIMITS) == pytest.approx(200.0)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.OTHER):
        assert patience(dataclasses.replace(first, phase=phase), LIMITS) is None
        assert patience(board(phase=phase), LIMITS) is not None
    assert (
        patience(dataclasses.replace(first, phase=Phase.OTHER, inside=True), LIMITS)
        == LIMITS.floor_collective
    )
    assert patience(board(stall=3.0), LIMITS) == pytest.approx(3.0)
    assert patience(dataclasses.replace(first, phase=Phase.OTHER, stall=3.0), LIMITS) is None
    assert suspicious(board(), LIMITS)
    assert not suspicious(board(beat=999 * S, phase_since=999 * S), LIMITS)


def test_thresholds_are_refused_with_the_way_out() -> None:
    with pytest.raises(ThresholdError, match=r"no threshold 'flor'; nearest: floor"):
        LIMITS.override({"flor": 1})
    assert LIMITS.override({"floor": 5}).floor == pytest.approx(5.0)
