"""The cause of one rank, a pure function of its observation (docs/formulas.md, section 5). No torch.

The order of the questions: dead, stopped, moving, then what an idle or a busy process shows. What the
observation does not decide is UNKNOWN: a wrong diagnosis is worse than none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from backlight.processes import WaitReason
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.diagnosis import HIGH, LOW, MEDIUM, BackwardSpeed, Cause, What
from backlight.watchdog.graph_samples import find_largest_share
from backlight.watchdog.observation import (
    MAX_IDLE_SCHEDULED,
    MIN_CORE_SHARE,
    MIN_NATIVE,
    Observation,
    StackSummary,
    hardly_ran,
    is_starved,
    main_stacks,
    summarize_stacks,
)
from backlight.watchdog.shared_state import StateSnapshot
from backlight.watchdog.stacks import (
    Frame,
    ThreadStack,
    in_collective,
    in_native_backward,
    is_compiling,
    native_function,
    native_operation,
    phase_of,
    recomputed_region,
    user_frame,
)
from backlight.watchdog.timeouts import EXEMPT_PHASES, StallLimits, timeout_of, waiting_timeout_of
from backlight.watchdog.waits import WaitName

MIN_HEARTBEATS = 3
"""Different counts of progress without which a rank is not called moving."""

PAUSE_FACTOR = 2.0
"""Multiple of its longest pause so far up to which a silence is ordinary."""

MIN_PAUSE_S = 0.3
"""Silence that is always ordinary: snapshots are this far apart."""

SYNCHRONIZING = frozenset({
    "wait", "synchronize", "item", "tolist", "cpu", "numpy", "to", "copy_", "nonzero", "_local_scalar_dense",
    "_cuda_synchronize", "_accelerator_synchronizeDevice", "wait_tensor",
})  # fmt: skip
"""Functions in C in which a host waits for a device."""

COMPETES_PER_S = 50.0
"""Time slices per second above which a thread does not just wait for a lock."""

MAX_IDLE_CORES = 0.05
"""Cores below which a process that is not watched only waits; launchers that poll stay below it."""

MIN_BUSY_CORES = 0.6
"""Cores above which its main thread computes without a pause."""

MIN_STACKS = 3
"""Stacks without which a process that is not watched is not called still."""


def cause_of(obs: Observation, limits: StallLimits, timeout_s: float | None = None) -> Cause | None:
    """Return why a rank makes no progress, None where there is nothing to report.

    ``timeout_s`` applies in place of the rank's own timeout, where other ranks wait for it. A process that is
    not watched has no timeout.
    """
    state = obs.state
    if obs.end is not None:
        return _cause(obs, DiagnosisKind.DEAD, What.ENDED, confidence=HIGH, end=obs.end)
    if obs.stopped:
        return _cause(obs, DiagnosisKind.STOPPED, What.STOPPED, confidence=HIGH)
    if state is None:
        return _cause_from_outside(obs)
    if state.is_closed:
        return None
    is_exempt = state.phase in EXEMPT_PHASES and not state.inside
    if timeout_s is None or is_exempt:
        # What computes elsewhere is waited for, and gets the time of work.
        computes = obs.children_compute or (obs.cause is not None and obs.cause.progresses)
        waits = is_idle(obs, limits) and not computes
        timeout_s = waiting_timeout_of(state, limits, obs.at_start_s) if waits else timeout_of(state, limits)
    if timeout_s is None:
        return None
    summary = summarize_stacks(obs, limits)
    thread = summary.thread
    if obs.cause is not None and state.silence_s >= timeout_s:
        if not obs.cause.progresses:
            return _at(obs, summary, What.NAMED_WAIT, confidence=HIGH, named=obs.cause)
        if obs.cause.name is not WaitName.BUSY_WORKER:  # one may compute for ever: its phase is reported
            return None
    if thread is not None:
        is_exempt |= state.phase is not Phase.BACKWARD and phase_of(thread) in EXEMPT_PHASES
    if is_exempt or (thread is not None and is_compiling(thread)):
        return None
    if state.phase is Phase.BACKWARD and is_moving(state, timeout_s):
        return _slow(obs, state) if state.phase_s > timeout_s and is_steady(obs, state.phase_since) else None
    if state.silence_s < timeout_s:
        return None
    if state.current_call is not None or (thread is not None and in_collective(thread)):
        call = obs.current_call
        confidence = MEDIUM if call is None else HIGH
        return _at(obs, summary, What.IN_COLLECTIVE, confidence=confidence, call=call, waits=True)
    pending = obs.pending
    if pending is not None and _synchronizes(obs, state, summary, limits):
        function = summary.threads[-1].called
        return _at(obs, summary, What.SYNCHRONIZES, function=function, call=pending, waits=True)
    if state.phase is not Phase.BACKWARD:
        return _outside_backward(obs, state, summary, limits)
    return _in_backward(obs, state, summary, limits)


def named_cause(obs: Observation, limits: StallLimits) -> Cause | None:
    """Return the cause by a wait with a name, whatever the phase and its timeout; None without one."""
    if obs.cause is None or obs.cause.progresses or obs.state is None:
        return None
    summary = summarize_stacks(obs, limits)
    return _at(obs, summary, What.NAMED_WAIT, confidence=HIGH, named=obs.cause)


def moves(obs: Observation) -> Cause:
    """Return the finding on a watched process for which there is nothing to report."""
    return _cause(obs, DiagnosisKind.PASS, What.MOVES)


def name_function(cause: Cause, function: str) -> Cause:
    """Return a cause with the function in C that holds the interpreter lock, where one does."""
    return replace(cause, function=function) if cause.holds_interpreter else cause


def is_moving(state: StateSnapshot, timeout_s: float) -> bool:
    """Return whether the last heartbeat is recent, measured by the timeout."""
    return state.silence_s < 0.5 * timeout_s


def is_steady(obs: Observation, since: int) -> bool:
    """Return whether a rank has progressed again and again since a moment, in monotonic nanoseconds."""
    heartbeats: dict[int, int] = {}
    for state in obs.history or obs.snapshots:
        if state.heartbeat >= since:
            heartbeats.setdefault(state.progress, state.heartbeat)
    times = sorted(heartbeats.values())
    if obs.state is None or len(times) < MIN_HEARTBEATS:
        return False
    # A step that hangs right after some heartbeats has moved a moment ago as well.
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    return obs.state.silence_s <= max(PAUSE_FACTOR * longest / 1e9, MIN_PAUSE_S)


def _cause(obs: Observation, kind: DiagnosisKind, what: What, **changes: Any) -> Cause:
    """Return a cause with what the observation shows of its circumstances."""
    state, rank = obs.state, obs.rank if obs.rank >= 0 else None
    if state is None:
        return Cause(kind, what, rank=rank, pid=obs.pid, is_watched=False, cpu=obs.cpu, **changes)
    values = {
        "phase": state.phase, "rank": rank, "pid": state.pid, "step": state.step,
        "parameter": obs.last_parameter, "cpu": _used_cpu(obs), "silence_s": state.silence_s,
        "reached": state.reached if obs.last_parameter is not None else 0,
        "expected": state.expected if state.phase is Phase.BACKWARD else 0,
    }  # fmt: skip
    return Cause(kind, what, **{**values, **changes})


def _at(obs: Observation, summary: StackSummary, what: What, **changes: Any) -> Cause:
    """Return the cause of a rank that is blocked at its line."""
    frame = summary.frame
    line = None if frame is None else str(frame)
    return _cause(obs, DiagnosisKind.BLOCKED, what, frame=frame, line=line, **changes)


def _slow(obs: Observation, state: StateSnapshot) -> Cause:
    rate, remaining_s = estimate_speed(obs.snapshots)
    recomputed = obs.graph_build.recomputed if obs.graph_build is not None else 0
    share = find_largest_share(obs.graph_build)
    node = _class_name(state.node)
    speed = BackwardSpeed(
        state.phase_s, state.nodes_done, state.nodes_total, rate, remaining_s, recomputed, share,
        state.node_calls,
    )  # fmt: skip
    return _cause(
        obs,
        DiagnosisKind.SLOW,
        What.SLOW_BACKWARD,
        speed=speed,
        confidence=HIGH if rate or recomputed else MEDIUM,
        line=f"{share.file}:{share.line}" if share is not None else None,
        module=node or None,
    )


def estimate_speed(snapshots: Iterable[StateSnapshot]) -> tuple[float | None, float | None]:
    """Return nodes per second and the remaining seconds of a backward pass, None where not known."""
    positioned = [s for s in snapshots if s.nodes_done > 0]
    if not positioned:
        return None, None
    newest = positioned[-1]
    earlier = [
        s for s in positioned if s.phase_since == newest.phase_since and s.nodes_done < newest.nodes_done
    ]
    if earlier:
        done, since = newest.nodes_done - earlier[0].nodes_done, earlier[0].heartbeat
    elif newest.phase_s > 0:
        done, since = newest.nodes_done, newest.phase_since
    else:
        return None, None
    rate = done / max((newest.heartbeat - since) / 1e9, 1e-9)
    if rate <= 0 or not newest.nodes_total:
        return rate, None
    return rate, max(newest.nodes_total - newest.nodes_done, 0) / rate


def _synchronizes(obs: Observation, state: StateSnapshot, summary: StackSummary, limits: StallLimits) -> bool:
    """Return whether the host waits for a collective or a device, in the same call in every sample."""
    called = {thread.called for thread in summary.threads}
    if len(called) != 1 or not summary.same_line or summary.runs_bytecode:
        return False
    name = called.pop()
    # The driver of a device may wait without sleeping.
    return (name == "wait" and is_idle(obs, limits)) or (state.device and name in SYNCHRONIZING)


def _outside_backward(
    obs: Observation, state: StateSnapshot, summary: StackSummary, limits: StallLimits
) -> Cause:
    phase, frame = state.phase, summary.frame
    if phase in {Phase.OTHER, Phase.FORWARD, Phase.LOSS} and summary.thread is not None:
        shown = phase_of(summary.thread)
        phase = phase if shown in {None, Phase.BACKWARD} else shown
    return _cause(
        obs,
        DiagnosisKind.PHASE,
        What.OUTSIDE_BACKWARD,
        phase=phase,
        confidence=HIGH if summary.same_line else MEDIUM,
        frame=frame,
        line=None if frame is None else str(frame),
        same_line=summary.same_line,
        wait=obs.wait if is_idle(obs, limits) else WaitReason.UNKNOWN,
        workers=obs.workers if phase is Phase.DATA else None,
        parameter=None,
    )


def _in_backward(obs: Observation, state: StateSnapshot, summary: StackSummary, limits: StallLimits) -> Cause:
    frame = None if summary.native else summary.frame
    same: dict[str, Any] = {
        "frame": frame,
        "region": recomputed_region(summary.thread) if summary.thread is not None else None,
        "line": str(frame) if frame is not None and summary.same_function else None,
        "module": _class_name(state.node) if state.node_since else None,
        "same_line": summary.same_line,
        "thread": _thread_name(summary, state),
        "is_sampled": bool(summary.threads) and not summary.native,
        "wait": obs.wait,
    }

    def unknown(why: What, function: str = "") -> Cause:
        return _cause(obs, DiagnosisKind.UNKNOWN, why, confidence=LOW, function=function, **same)

    # It seems to wait for a lock, but wakes all the time while its process computes.
    computes = obs.cpu is not None and obs.cpu >= limits.busy
    if computes and obs.wait is WaitReason.LOCK and (obs.slices_per_s or 0.0) >= COMPETES_PER_S:
        return unknown(What.STARVED_OF_LOCK)
    if is_idle(obs, limits):
        if state.device and not (state.node_since and obs.wait in {WaitReason.LOCK, WaitReason.SLEEP}):
            return unknown(What.WAITS_FOR_DEVICE)
        for_ranks = summary.native and state.world_size > 1
        return _cause(
            obs,
            DiagnosisKind.BLOCKED,
            What.REDUCES if for_ranks else What.IDLE,
            confidence=HIGH if summary.same_line and frame is not None else MEDIUM,
            call=obs.reduction if for_ranks else None,
            waits=for_ranks,
            holds_interpreter=bool(obs.samples) and obs.holds_interpreter and not summary.native,
            **same,
        )
    if is_starved(obs.thread_cpu, obs.scheduled) and (summary.native or _ran_shortly(obs, state, limits)):
        return unknown(What.STARVED_OF_CORES)
    if not _is_busy(obs, limits):
        return unknown(What.PAUSES)
    if summary.native:
        operation, is_one = _native_operation(obs, state)
        if not is_one:
            return unknown(What.ONE_OR_MANY_OPERATIONS, operation)
        same |= {"module": operation or None, "confidence": HIGH if operation else MEDIUM}
        return _cause(obs, DiagnosisKind.LONG_OP, What.LONG_OPERATION, function=operation, **same)
    if not (summary.same_line or (summary.same_function and state.node_since)):
        return unknown(What.STACKS_DIFFER)
    if summary.runs_bytecode or obs.holds_interpreter:
        same |= {
            "holds_interpreter": not summary.runs_bytecode,
            "confidence": HIGH if summary.same_line else MEDIUM,
        }
        return _cause(obs, DiagnosisKind.SPIN, What.SPINS, **same)
    if summary.runs_bytecode is False:
        return _cause(obs, DiagnosisKind.LONG_OP, What.LONG_CALL, **same)
    return unknown(What.PYTHON_OR_NATIVE)


def _native_operation(obs: Observation, state: StateSnapshot) -> tuple[str, bool]:
    """Return the operation that native stacks show, and whether backward is in one that has not ended."""
    operations = [op for sample in obs.native_samples if (op := native_operation(sample)) is not None]
    named = operations[0] if len(operations) >= MIN_NATIVE and len(set(operations)) == 1 else ""
    # Inside a custom function it may be a backward pass of its own, whose nodes are not known.
    nested = bool(state.node_since) or (obs.graph_build is not None and obs.graph_build.recomputed > 0)
    close = state.position_hooks > 0 and state.nodes_total <= 4 * state.position_hooks
    return named, not nested and (close or bool(named and state.nodes_total and state.nodes_total <= 8))


def _used_cpu(obs: Observation) -> float | None:
    return obs.thread_cpu if obs.thread_cpu is not None else obs.cpu


def is_idle(obs: Observation, limits: StallLimits) -> bool:
    """Return whether a process used no core and queued for none."""
    used = _used_cpu(obs)
    queues = obs.scheduled is not None and obs.scheduled > MAX_IDLE_SCHEDULED
    return used is not None and used <= limits.idle and not queues and (obs.cpu is None or obs.cpu <= 1.0)


def _ran_shortly(obs: Observation, state: StateSnapshot, limits: StallLimits) -> bool:
    """Return whether a starved thread has run for less since its last progress than one that just is not."""
    timeout_s = timeout_of(state, limits) or limits.floor
    return (obs.thread_cpu or 0.0) * state.silence_s < MIN_CORE_SHARE * timeout_s


def _is_busy(obs: Observation, limits: StallLimits) -> bool:
    used = _used_cpu(obs)
    # On an overloaded machine a thread that computes also queues.
    queues = obs.scheduled is not None and obs.scheduled >= limits.busy
    return used is not None and (used >= limits.busy or (used > limits.idle and queues))


def _thread_name(summary: StackSummary, state: StateSnapshot) -> str:
    thread = summary.thread
    if thread is None or thread.ident == state.main_ident or thread.name == "MainThread":
        return ""
    return thread.name or hex(thread.ident)


def _class_name(node: str) -> str:
    return node.removesuffix("Backward")


# A process that is not watched: its stacks and CPU usage alone, which decide less


def _cause_from_outside(obs: Observation) -> Cause:
    threads = main_stacks(obs)
    frames = [user_frame(t) for t in threads]
    frame = frames[-1] if frames else None
    what = _shown_outside(obs, threads, frames)
    kind = DiagnosisKind.BLOCKED if what is What.WAITS else DiagnosisKind.UNKNOWN
    confidence = {What.WAITS: HIGH, What.STACK_CHANGES: MEDIUM}.get(what, LOW)
    function = next((name for s in obs.native_samples if (name := native_function(s, obs.pid))), "")
    holds = bool(threads) and all(t.holds_gil for t in threads)
    holds = holds and (what is What.WAITS or (what is What.COMPUTES and bool(function)))
    if what is What.NATIVE_BACKWARD:
        function = next((op for sample in obs.native_samples if (op := native_operation(sample))), "")
    if obs.cause is not None:
        # What computes elsewhere is waited for, not hung.
        kind = DiagnosisKind.PASS if obs.cause.progresses else DiagnosisKind.BLOCKED
        what, confidence = What.NAMED_WAIT, HIGH
    return _cause(
        obs,
        kind,
        what,
        phase=(phase_of(threads[-1]) if threads else None) or Phase.OTHER,
        confidence=confidence,
        line=None if frame is None else str(frame),
        frame=frame,
        named=obs.cause,
        wait=obs.wait,
        workers=obs.workers,
        holds_interpreter=holds,
        function=function,
        waits=bool(threads) and in_collective(threads[0]),
    )


def _shown_outside(obs: Observation, threads: list[ThreadStack], frames: list[Frame | None]) -> What:
    used = obs.cpu or 0.0
    if not threads:
        return What.NO_STACKS
    if len(frames) < MIN_STACKS:
        return What.FEW_STACKS
    if any(frame != frames[-1] for frame in frames):
        return What.STACK_CHANGES
    if hardly_ran(obs, obs.samples):
        return What.STARVED
    if used <= MAX_IDLE_CORES:
        return What.WAITS
    busy = obs.thread_cpu if obs.thread_cpu is not None else used
    if busy >= MIN_BUSY_CORES and in_native_backward(threads[-1]):
        return What.NATIVE_BACKWARD
    return What.COMPUTES
