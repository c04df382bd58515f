"""Diagnosis of one rank, from written observations, without any process."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from backlight.findings.limits import ThresholdError
from backlight.processes import ProcessEnd, WaitReason
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.cause import cause_of, estimate_speed
from backlight.watchdog.collectives import CollectiveRecord, Dump
from backlight.watchdog.graph_samples import GraphBuild
from backlight.watchdog.observation import IssuedCollectives, Observation, Workers
from backlight.watchdog.shared_state import Collective, StateSnapshot
from backlight.watchdog.stacks import REGION_LINE, Frame, StackSample, ThreadStack, native_operation
from backlight.watchdog.text import Diagnosis, describe
from backlight.watchdog.timeouts import StallLimits, is_suspicious, timeout_of, waiting_timeout_of
from backlight.watchdog.waits import WaitCause, WaitName, WorkerStack
from recorded_observations import ENGINE, LIMITS, MAIN, TOP, USER, S, native, observation, samples, snapshot


def diagnose(obs: Observation, limits: StallLimits, timeout_s: float | None = None) -> Diagnosis | None:
    cause = cause_of(obs, limits, timeout_s)
    return None if cause is None else describe(cause)


def backward_snapshots(*heartbeats: float) -> tuple[StateSnapshot, ...]:
    """Snapshots of a backward that began at 900 s, one heartbeat apart, all but the last at heartbeats."""
    states = [
        snapshot(
            taken=int(at * S), heartbeat=int(at * S), progress=50 + n, phase_since=900 * S,
            nodes_total=1_000_000,
        )
        for n, at in enumerate(heartbeats)
    ]  # fmt: skip
    return (*states[:-1], dataclasses.replace(states[-1], taken=1000 * S))


def progressing(*heartbeats: float, **changes: Any) -> Observation:
    snapshots = backward_snapshots(*heartbeats)
    return observation(snapshots[-1], snapshots=snapshots[-1:], history=snapshots, cpu=1.0, **changes)


def in_phase(phase: Phase, **changes: Any) -> StateSnapshot:
    return snapshot(phase=phase, heartbeat=500 * S, phase_since=500 * S, node_since=0, **changes)


CALL = Collective(1, 17, 2, 3, 960 * S, 0, "all_reduce(16 float32)")
BUSY: dict[str, Any] = {"cpu": 1.0, "thread_cpu": 1.0}
LOOP = samples(USER, ENGINE, TOP, runs_bytecode=True)
NATIVE = samples(ENGINE, TOP)
LINES = ((USER,),)
EVERY_TENTH = tuple((10 * i, 0) for i in range(1, 10))
K = DiagnosisKind
CASES = {
    "wait": (
        observation(wait=WaitReason.LOCK), K.BLOCKED,
        "BLOCKED: the main thread waits for a lock in LockedFn.backward, ops.py:22; CPU 0 %; 40 s; "
        "last parameter reached: 0.bias (2 of 4)",
    ),
    "loop": (
        observation(samples=LOOP, **BUSY), K.SPIN, "SPIN: the main thread computes in LockedFn.backward",
    ),
    "loop that holds the interpreter lock": (
        observation(samples=samples(USER, ENGINE, TOP, source="faulthandler"), **BUSY), K.SPIN,
        "in C code that holds the interpreter lock",
    ),
    "one native call": (
        observation(samples=samples(USER, ENGINE, TOP, runs_bytecode=False), **BUSY), K.LONG_OP,
        "one native call in LockedFn.backward",
    ),
    "one native call, by its native stacks": (
        observation(native_samples=native(holds_gil=False), **BUSY), K.LONG_OP,
        "one native call in LockedFn.backward",
    ),
    "native stacks of which one holds the interpreter lock": (
        observation(native_samples=(*native(holds_gil=False), *native(holds_gil=True)), **BUSY), K.UNKNOWN,
        "whether it runs Python or native code is not known",
    ),
    "Python or native": (
        observation(**BUSY), K.UNKNOWN, "whether it runs Python or native code is not known",
    ),
    "few samples": (
        observation(samples=samples(USER, ENGINE, count=2), **BUSY), K.UNKNOWN, "too few could be taken",
    ),
    "no samples": (observation(samples=(), **BUSY), K.UNKNOWN, "did not finish in the time given"),
    "samples before the last heartbeat": (
        observation(snapshot(heartbeat=995 * S, phase_since=900 * S, timeout_s=2.0), samples=LOOP, **BUSY),
        K.UNKNOWN, "too few could be taken",
    ),
    "unknown CPU": (observation(cpu=None, thread_cpu=None), K.UNKNOWN, "neither waits nor computes"),
    "pauses": (observation(cpu=0.3, thread_cpu=0.3), K.UNKNOWN, "neither waits nor computes"),
    "queues while it pauses": (
        observation(samples=LOOP, cpu=0.2, thread_cpu=0.2, scheduled=0.25),
        K.UNKNOWN, "neither waits nor computes",
    ),
    "queues for a core": (
        observation(cpu=0.04, thread_cpu=0.04, scheduled=0.9, slices_per_s=30.0),
        K.UNKNOWN, "waits for a core",
    ),
    "neither runs nor queues": (
        observation(wait=WaitReason.LOCK, scheduled=0.0, slices_per_s=0.0), K.BLOCKED, "waits for a lock",
    ),
    "competes for the interpreter lock": (
        observation(thread_cpu=0.03, cpu=1.0, scheduled=0.05, slices_per_s=180.0, wait=WaitReason.LOCK),
        K.UNKNOWN, "starved of the interpreter lock",
    ),
    "steady heartbeats": (progressing(980, 986, 992), K.SLOW, "; the line that made the nodes is not known"),
    "known line of the nodes": (
        progressing(980, 986, 992, graph_build=GraphBuild(0, 100, EVERY_TENTH, LINES)),
        K.SLOW, "of the nodes come from ops.py:22, by 9 samples of forward",
    ),
    "native code": (
        observation(snapshot(node_since=0), samples=NATIVE, **BUSY), K.UNKNOWN, "many short ones",
    ),
    "native code between close hooks": (
        observation(snapshot(node_since=0, position_hooks=50), samples=NATIVE, **BUSY),
        K.LONG_OP, "one native operation",
    ),
    "backward inside a custom function": (
        observation(snapshot(position_hooks=50, node="CheckpointFunctionBackward"), samples=NATIVE, **BUSY),
        K.UNKNOWN, "many short ones",
    ),
    "recomputation": (
        observation(
            snapshot(node_since=0, position_hooks=50), samples=NATIVE,
            graph_build=GraphBuild(0, 7, ((3, 0), (90_000, 0)), LINES), **BUSY,
        ),
        K.UNKNOWN, "many short ones",
    ),
    "wait for a device": (
        observation(snapshot(device=True, node_since=0), samples=NATIVE), K.UNKNOWN, "the host waits",
    ),
    "wait for data": (observation(in_phase(Phase.DATA), samples=samples(TOP)), K.PHASE, "PHASE data: "),
    "forward": (observation(in_phase(Phase.FORWARD), samples=samples(TOP)), K.PHASE, "PHASE forward: "),
    "optimizer": (observation(in_phase(Phase.OPTIMIZER), samples=samples(TOP)), K.PHASE, "PHASE optimizer: "),
    "collective": (
        observation(in_phase(Phase.OTHER, inside=True, collectives=(CALL,)), samples=samples(TOP)),
        K.BLOCKED, "waits in all_reduce(16 float32) #17, called at train.py:5 in main",
    ),
    "dead": (
        observation(end=ProcessEnd(signal.SIGKILL)), K.DEAD,
        "rank 0 killed by SIGKILL at step 2, in backward",
    ),
    "dead after backward": (
        observation(snapshot(phase=Phase.OTHER), end=ProcessEnd(signal.SIGKILL)),
        K.DEAD, "at step 2, between phases",
    ),
    "stopped": (observation(stopped=True), K.STOPPED, "is stopped by a signal"),
}  # fmt: skip


@pytest.mark.parametrize(("obs", "kind", "words"), CASES.values(), ids=list(CASES))
def test_diagnosis(obs: Observation, kind: DiagnosisKind, words: str) -> None:
    found = diagnose(obs, LIMITS)
    assert found.kind is kind
    assert words in found.claim
    assert found.refuted_if


def test_subject_of_a_diagnosis() -> None:
    blocked, slow, dead, later = (
        diagnose(CASES[name][0], LIMITS)
        for name in ("wait", "known line of the nodes", "dead", "dead after backward")
    )
    assert (blocked.line, blocked.parameter, blocked.module) == ("/home/me/ops.py:22", "0.bias", "LockedFn")
    assert slow.line == "/home/me/ops.py:22"
    assert (dead.parameter, later.parameter) == ("0.bias", None)  # that backward is over
    waiting, alone = (cause_of(CASES[name][0], LIMITS) for name in ("collective", "wait"))
    assert (waiting.waits, alone.waits) == (True, False)


def test_moving_backward_is_slow_with_rate_and_eta() -> None:
    first, middle, last = backward_snapshots(990, 995, 1000)
    first = dataclasses.replace(first, nodes_done=20_000)
    last = dataclasses.replace(last, nodes_done=145_000)
    found = diagnose(observation(last, snapshots=(first, middle, last), cpu=1.0), LIMITS)
    assert found.kind is DiagnosisKind.SLOW
    assert "backward 145,000 of 1,000,000 nodes, 12.5k/s, ETA 68 s" in found.claim


@pytest.mark.parametrize(
    "frames", [(USER, ENGINE, TOP), (ENGINE, TOP)], ids=["a line of Python", "native code"]
)
@pytest.mark.parametrize("source", ["sampler", "faulthandler"])
def test_samples_of_a_thread_that_waits_for_a_core_show_nothing(
    frames: tuple[Frame, ...], source: str
) -> None:
    state = snapshot(position_hooks=50, node_since=0 if frames[0] is ENGINE else 960 * S)
    same = {"samples": samples(*frames, runs_bytecode=True, source=source), "scheduled": 0.95}
    for ran in (0.01, 0.06, 0.14):
        starved = diagnose(observation(state, thread_cpu=ran, cpu=ran, **same), LIMITS)
        assert (starved.kind, starved.line is None) == (
            DiagnosisKind.UNKNOWN,
            ran < 0.1 or frames[0] is ENGINE,
        )
        assert "it waits for a core most of the time" in starved.claim
    computing = diagnose(observation(state, thread_cpu=0.25, cpu=0.25, **same), LIMITS)
    assert computing.kind is (DiagnosisKind.LONG_OP if frames[0] is ENGINE else DiagnosisKind.SPIN)


def test_spin_on_a_busy_machine_names_its_line_once_it_has_run_for_long_enough() -> None:
    """At 15 % of a core: 40 s are 6 s of work, as much as 30 s of a thread that has 20 %."""
    for ran, kind, words in (
        (0.16, K.SPIN, "the main thread computes in LockedFn.backward, ops.py:22"),
        (0.12, K.UNKNOWN, "does not show what it does; in every sample at ops.py:22 in LockedFn.backward"),
        (0.02, K.UNKNOWN, "; now at ops.py:22 in LockedFn.backward"),
    ):
        found = diagnose(observation(samples=LOOP, thread_cpu=ran, cpu=ran, scheduled=0.95), LIMITS)
        assert (found.kind, words.removeprefix("does not show what it does") in found.claim) == (kind, True)
    moving = (*LOOP[:-1], *samples(TOP, ENGINE, TOP, runs_bytecode=True)[-1:])  # the control
    found = diagnose(observation(samples=moving, thread_cpu=0.16, cpu=0.16, scheduled=0.95), LIMITS)
    assert (found.kind, "stacks differ" in found.claim) == (K.UNKNOWN, True)


def test_phase_that_hardly_ran_names_no_line_in_every_sample() -> None:
    state = snapshot(phase=Phase.FORWARD, heartbeat=500 * S, phase_since=500 * S, node_since=0)
    every = "in every sample at train.py:5"
    for ran, scheduled, when in ((0.05, 0.9, "now at train.py:5"), (0.15, 0.9, every), (0.15, 0.3, every)):
        found = diagnose(
            observation(state, samples=samples(TOP), thread_cpu=ran, cpu=ran, scheduled=scheduled), LIMITS
        )
        assert when in found.claim


def test_speed_without_a_position_is_unknown() -> None:
    assert estimate_speed([snapshot(nodes_done=0)]) == (None, None)


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


STORAGE = WaitCause(WaitName.STORAGE, path="/mnt/x.pt")


def test_wait_with_a_name_inside_a_checkpoint() -> None:
    """A checkpoint has no timeout of its own; one whose storage does not answer is reported in the end."""
    late = snapshot(phase=Phase.CHECKPOINT, heartbeat=0, phase_since=0, timeout_s=1.0)
    found = diagnose(observation(late, cause=STORAGE), LIMITS, 1.0)
    assert found is not None
    assert (found.kind, found.phase) == (DiagnosisKind.BLOCKED, Phase.CHECKPOINT)
    assert "on /mnt/x.pt (state D)" in found.claim
    slow = dataclasses.replace(STORAGE, progresses=True)
    early = in_phase(Phase.CHECKPOINT, timeout_s=1.0)  # 500 s ago
    evaluating = snapshot(phase=Phase.EVALUATION, heartbeat=0, phase_since=0, timeout_s=1.0)
    for state, cause in ((late, slow), (late, None), (early, STORAGE), (evaluating, STORAGE)):
        assert diagnose(observation(state, cause=cause), LIMITS, 1.0) is None


def compiling(file: str) -> Observation:
    state = snapshot(phase=Phase.FORWARD, heartbeat=0, phase_since=0, timeout_s=1.0)
    return observation(state, samples=samples(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, "f"), TOP))


@pytest.mark.parametrize(
    "obs",
    [
        *(progressing(*beats) for beats in [(1000,), (999, 1000), (993.5, 994, 994.5, 995, 995.5)]),
        *(observation(snapshot(heartbeat=at * S, phase_since=(at - 10) * S)) for at in (990, 1000)),
        *(
            observation(snapshot(phase=phase, heartbeat=0, phase_since=0, timeout_s=timeout_s))
            for phase in (Phase.EVALUATION, Phase.CHECKPOINT)
            for timeout_s in (None, 1.0)
        ),
        compiling("/x/torch/_dynamo/convert_frame.py"),
        compiling("/x/torch/_inductor/codecache.py"),
        compiling("/x/torch/_inductor/graph.py"),
        compiling("/x/torch/_inductor/fx_passes/post_grad.py"),
        compiling("/x/torch/fx/experimental/proxy_tensor.py"),
    ],
    ids=[
        *(f"{n}-heartbeats" for n in ("one", "two", "few")), "within-timeout", "heartbeat-now",
        *(f"{phase}-{stall}" for phase in ("evaluation", "checkpoint") for stall in ("auto", "stall")),
        *(f"compilation-{n}" for n in range(5)),
    ],
)  # fmt: skip
def test_no_diagnosis(obs: Observation) -> None:
    assert diagnose(obs, LIMITS) is None


@pytest.mark.parametrize(
    ("file", "function", "silent"),
    [
        ("/x/torch/_inductor/compile_fx.py", "compile_fx_backward", True),
        ("/x/torch/_inductor/compile_fx.py", "cudagraphify.<locals>.run", False),
        ("/x/torch/_inductor/output_code.py", "CompiledFxGraph.__call__", False),
        # max-autotune benchmarks kernels at their first launch
        ("/x/torch/_inductor/runtime/benchmarking.py", "InductorBenchmarker.benchmark_gpu", True),
        ("/x/torch/_inductor/runtime/triton_heuristics.py", "CachingAutotuner.benchmark_all_configs", True),
        ("/x/torch/_inductor/runtime/triton_heuristics.py", "CachingAutotuner._precompile_worker", True),
        ("/x/torch/_inductor/select_algorithm.py", "AlgorithmSelectorCache.autotune", True),
        ("/x/torch/_inductor/autotune_process.py", "TuningProcessPool.autotune", True),
        ("/x/torch/_inductor/runtime/triton_heuristics.py", "CachingAutotuner.run", False),
    ],
)
def test_backward_that_compiles_has_no_diagnosis_and_compiled_code_has(
    file: str, function: str, silent: bool
) -> None:
    stacks = samples(Frame("/x/pickle.py", 1, "dumps"), Frame(file, 2, function), ENGINE, TOP)
    assert (diagnose(observation(samples=stacks, wait=WaitReason.LOCK), LIMITS) is None) is silent


def test_rollouts_of_minutes_between_steps_are_ordinary() -> None:
    """Many short pauses between the updates of one rollout make the mean small; the longest one counts."""
    rollout = in_phase(Phase.OTHER, longest_other_s=400.0)
    assert timeout_of(in_phase(Phase.OTHER), LIMITS) == LIMITS.floor_other
    assert timeout_of(rollout, LIMITS) == pytest.approx(800.0)
    assert diagnose(observation(rollout), LIMITS) is None  # 500 s, before a typical time is known
    assert diagnose(observation(in_phase(Phase.OTHER)), LIMITS) is not None
    prepared = in_phase(Phase.OTHER, longest_other_s=9000.0)
    assert timeout_of(prepared, LIMITS) == pytest.approx(3600.0)
    assert timeout_of(in_phase(Phase.DATA, longest_other_s=400.0), LIMITS) == LIMITS.floor_data


IDLE: dict[str, Any] = {"cpu": 0.0, "thread_cpu": 0.0, "scheduled": 0.0}


@pytest.mark.parametrize("phase", [Phase.OTHER, Phase.DATA])
def test_wait_between_regular_steps_has_the_timeout_of_backward(phase: Phase) -> None:
    regular = snapshot(phase=phase, backwards=100, step=100, node_since=0)  # silent for 40 s
    assert waiting_timeout_of(regular, LIMITS) == LIMITS.floor
    found = diagnose(observation(regular, samples=samples(TOP), wait=WaitReason.LOCK, **IDLE), LIMITS)
    assert (found.kind, found.line) == (DiagnosisKind.PHASE, "/home/me/train.py:5")
    prepared = dataclasses.replace(regular, longest_other_s=9.0)
    found = diagnose(observation(prepared, samples=samples(TOP), at_start_s=9.0, **IDLE), LIMITS)
    assert found.kind is DiagnosisKind.PHASE  # that was before the first step
    for longest_s, at_start_s in ((9.5, 9.0), (11.0, 11.0)):  # one since, and a long one
        later = dataclasses.replace(regular, longest_other_s=longest_s)
        assert diagnose(observation(later, at_start_s=at_start_s, **IDLE), LIMITS) is None
    for control, changes in (
        (regular, BUSY),  # it computes
        (regular, {**IDLE, "children_compute": True}),  # what it has started computes
        (dataclasses.replace(regular, backwards=19), IDLE),
        (dataclasses.replace(regular, longest_other_s=4.0), IDLE),  # it has paused before
        (dataclasses.replace(regular, typical=dict.fromkeys(Phase, 4.0)), IDLE),
        (dataclasses.replace(regular, world_size=2), IDLE),
        (dataclasses.replace(regular, timeout_s=50.0), IDLE),
    ):
        assert diagnose(observation(control, samples=samples(TOP), **changes), LIMITS) is None


def test_worker_of_a_loader_is_named_with_its_line() -> None:
    at = Frame("/home/me/images.py", 8, "Images.__getitem__")
    workers = Workers(2, waits=(WaitReason.SLEEP,), stacks=(WorkerStack(4711, at, wait=WaitReason.SLEEP),))
    state = in_phase(Phase.DATA, backwards=100)
    found = diagnose(observation(state, workers=workers, samples=samples(TOP), **IDLE), LIMITS)
    assert found.kind is DiagnosisKind.PHASE
    worker = "worker 4711 of the data loader, which sleeps at images.py:8 in Images.__getitem__"
    assert f"waiting for 500 s for {worker}" in found.claim
    assert found.next_check == "read the code of the worker at images.py:8 in Images.__getitem__"
    none = dataclasses.replace(workers, stacks=())  # the control: it waits for work
    found = diagnose(observation(state, workers=none, samples=samples(TOP), **IDLE), LIMITS)
    assert "worker 4711" not in found.claim


def test_timeout_follows_the_run_and_backward_always_has_one() -> None:
    first = snapshot(backwards=0, forwards=0, step=0, typical=dict.fromkeys(Phase, 0.0))
    assert timeout_of(first, LIMITS) == LIMITS.floor
    assert timeout_of(snapshot(typical=dict.fromkeys(Phase, 20.0)), LIMITS) == pytest.approx(200.0)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.OTHER):
        assert timeout_of(dataclasses.replace(first, phase=phase), LIMITS) is None
        assert timeout_of(snapshot(phase=phase), LIMITS) is not None
    collective = dataclasses.replace(first, phase=Phase.OTHER, inside=True)
    assert timeout_of(collective, LIMITS) == LIMITS.floor_collective
    assert timeout_of(snapshot(timeout_s=3.0), LIMITS) == pytest.approx(3.0)
    assert timeout_of(dataclasses.replace(first, phase=Phase.OTHER, timeout_s=3.0), LIMITS) is None
    assert is_suspicious(snapshot(), LIMITS)
    assert not is_suspicious(snapshot(heartbeat=999 * S, phase_since=999 * S), LIMITS)


def test_unknown_threshold_suggests_the_nearest() -> None:
    with pytest.raises(ThresholdError, match=r"no threshold 'flor'; did you mean 'floor'"):
        LIMITS.override({"flor": 1})
    assert LIMITS.override({"floor": 5}).floor == pytest.approx(5.0)


def issued(*records: CollectiveRecord, calls: tuple[int, ...] = ()) -> IssuedCollectives:
    return IssuedCollectives(990 * S, calls, Dump(0, records))


OPEN = CollectiveRecord("0", (0, 1), 5, "all_reduce", ((16,),), dtypes=(("Float",), ()), label="default_pg")
DONE = dataclasses.replace(OPEN, number=4, completed=True)


def called(name: str) -> tuple[StackSample, ...]:
    stack = ThreadStack(MAIN, (TOP,), "MainThread", 4242, runs_bytecode=False, called=name)
    return tuple(StackSample((990 + i) * S, "sampler", (stack,)) for i in range(4))


def test_host_that_waits_for_a_handle_is_blocked_on_the_collective() -> None:
    state = in_phase(Phase.OTHER, world_size=2)
    found = cause_of(observation(state, samples=called("wait"), issued=issued(DONE, OPEN)), LIMITS, 30.0)
    assert found is not None
    assert (found.kind, found.waits, found.line) == (DiagnosisKind.BLOCKED, True, str(TOP))
    assert "waits in wait() at train.py:5 in main for all_reduce(16 float32) #5" in describe(found).claim


@pytest.mark.parametrize(
    ("name", "changes", "records"),
    [
        ("acquire", {}, (OPEN,)),  # another wait of the host, while a collective is open
        ("wait", {}, (DONE,)),  # every collective has completed
        ("item", {}, (OPEN,)),  # no device
        ("wait", {"cpu": 0.9, "thread_cpu": 0.9}, (OPEN,)),  # it computes
    ],
)
def test_other_wait_is_none_for_a_collective(
    name: str, changes: dict[str, Any], records: tuple[CollectiveRecord, ...]
) -> None:
    state = in_phase(Phase.OTHER, world_size=2)
    one = observation(state, samples=called(name), issued=issued(*records), **changes)
    found = cause_of(one, LIMITS, 30.0)
    assert found is not None
    assert not found.waits


@pytest.mark.parametrize("used", [0.0, 1.0], ids=["sleeps", "spins"])  # as drivers do in a synchronisation
def test_host_that_synchronises_a_device_is_blocked_on_the_collective(used: float) -> None:
    state = in_phase(Phase.OTHER, world_size=2, device=True)
    one = observation(state, samples=called("item"), issued=issued(OPEN), cpu=used, thread_cpu=used)
    found = cause_of(one, LIMITS, 30.0)
    assert found is not None
    assert (found.kind, found.waits) == (DiagnosisKind.BLOCKED, True)


def test_open_call_names_the_collective_where_there_is_no_flight_recorder() -> None:
    call = Collective(1, 3, 1, 1, 900 * S, 901 * S, "all_reduce(16 float32)", asynchronous=True, index=7)
    state = in_phase(Phase.OTHER, world_size=2, collectives=(call,))
    one = observation(state, issued=IssuedCollectives(990 * S, (7,), None))
    assert one.pending is not None
    assert one.pending.text == "all_reduce(16 float32) #3"
    assert dataclasses.replace(one, issued=IssuedCollectives(990 * S, (6,), None)).pending is None


CHECKPOINT = "/lib/torch/utils/checkpoint.py"
RECOMPUTES = Frame(CHECKPOINT, 1183, "_checkpoint_hook.__init__.<locals>.unpack_hook")


@pytest.mark.parametrize("again", [RECOMPUTES, Frame(CHECKPOINT, 312, "CheckpointFunction.backward")])
def test_wait_in_a_recomputation_names_the_region(again: Frame) -> None:
    block = Frame("/home/me/model.py", 14, "Block.forward")
    stack = ThreadStack(
        MAIN, (USER, Frame("/lib/torch/nn/modules/module.py", 9, "_call_impl"), block, again, ENGINE, TOP),
        variables=((REGION_LINE, "/home/me/model.py:31"),),
    )  # fmt: skip
    for shown, region in (
        (stack, " of model.py:31 (Block.forward)"),
        (dataclasses.replace(stack, variables=()), " (Block.forward)"),
        (dataclasses.replace(stack, frames=(again, ENGINE, TOP), variables=()), ""),
    ):
        taken = tuple(StackSample((990 + i) * S, "sampler", (shown,)) for i in range(4))
        found = diagnose(observation(samples=taken, wait=WaitReason.LOCK), LIMITS)
        assert found is not None
        assert f"; it is in the recomputation of the checkpointed region{region}; CPU 0 %" in found.claim


def test_wait_outside_of_a_recomputation_names_no_region() -> None:
    forward = Frame(CHECKPOINT, 500, "checkpoint")
    for frames in ((USER, ENGINE, TOP), (USER, forward, ENGINE, TOP)):  # a forward inside of backward
        found = diagnose(observation(samples=samples(*frames), wait=WaitReason.LOCK), LIMITS)
        assert found is not None
        assert found.kind is DiagnosisKind.BLOCKED
        assert "recomputation" not in found.claim
