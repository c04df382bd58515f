"""Diagnosis of one rank, a pure function of its observation (docs/formulas.md, section 5). No torch.

The order of the questions: dead, stopped, moving, then what an idle or a busy process shows. What the
observation does not decide is UNKNOWN: a wrong diagnosis is worse than none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

from backlight.records import DiagnosisKind, Phase
from backlight.watchdog import stacks
from backlight.watchdog.graph_samples import find_largest_share
from backlight.watchdog.named_waits import BUSY_WORKER, WaitCause
from backlight.watchdog.observation import HIGH, LOW, MEDIUM, Diagnosis, Observation, in_phase
from backlight.watchdog.shared_state import StateSnapshot
from backlight.watchdog.stack_summary import (
    MAX_IDLE_SCHEDULED,
    StackSummary,
    is_starved,
    summarize_stacks,
)
from backlight.watchdog.timeouts import EXEMPT_PHASES, StallLimits, timeout_of

MIN_HEARTBEATS = 3
"""Different counts of progress without which a rank is not called moving."""

PAUSE_FACTOR = 2.0
"""Multiple of its longest pause so far up to which a silence is ordinary."""

MIN_PAUSE_S = 0.3
"""Silence that is always ordinary: snapshots are this far apart."""

HELD = " in C code that holds the interpreter lock"
"""Words of a claim that the name of the function in C completes."""

SYNCHRONIZING = frozenset({
    "wait", "synchronize", "item", "tolist", "cpu", "numpy", "to", "copy_", "nonzero", "_local_scalar_dense",
    "_cuda_synchronize", "_accelerator_synchronizeDevice", "wait_tensor",
})  # fmt: skip
"""Functions in C in which a host waits for a device."""

STARVED = "it is slow: it waits for a core most of the time, so its stacks do not show what it does"
"""Why nothing follows from the stacks of a thread that hardly ran between them."""

COMPETES_PER_S = 50.0
"""Time slices per second above which a thread does not just wait for a lock."""


def diagnose(obs: Observation, limits: StallLimits, timeout_s: float | None = None) -> Diagnosis | None:
    """Return the diagnosis of a rank, None where there is nothing to report.

    ``timeout_s`` applies in place of the rank's own timeout, where other ranks wait for it.
    """
    state = obs.state
    if obs.ended:
        return _ended(obs)
    if obs.stopped:
        return _stopped(obs)
    if state is None or state.is_closed:
        return None
    is_exempt = state.phase in EXEMPT_PHASES and not state.inside
    timeout_s = timeout_of(state, limits) if timeout_s is None or is_exempt else timeout_s
    if timeout_s is None:
        return None
    summary = summarize_stacks(obs, limits)
    thread = summary.thread
    if obs.cause is not None and state.silence_s >= timeout_s:
        if not obs.cause.progresses:
            return _for_cause(obs, obs.cause, state, summary)
        if obs.cause.name != BUSY_WORKER:  # one may compute for ever: its phase is reported
            return None
    if thread is not None:
        is_exempt |= state.phase is not Phase.BACKWARD and stacks.phase_of(thread) in EXEMPT_PHASES
    if is_exempt or (thread is not None and stacks.is_compiling(thread)):
        return None
    if state.phase is Phase.BACKWARD and is_moving(state, timeout_s):
        return _slow(obs, state) if state.phase_s > timeout_s and is_steady(obs, state.phase_since) else None
    if state.silence_s < timeout_s:
        return None
    if state.current_call is not None or (thread is not None and stacks.in_collective(thread)):
        return _in_collective(obs, state, summary)
    if obs.pending and _synchronizes(obs, state, summary, limits):
        return _in_synchronization(obs, state, summary)
    if state.phase is not Phase.BACKWARD:
        return _outside_backward(obs, state, summary, limits)
    return _in_backward(obs, state, summary, limits)


def diagnose_cause(obs: Observation, limits: StallLimits) -> Diagnosis | None:
    """Return the diagnosis of a wait with a name, whatever the phase and its timeout; None without one."""
    if obs.cause is None or obs.cause.progresses or obs.state is None:
        return None
    return _for_cause(obs, obs.cause, obs.state, summarize_stacks(obs, limits))


def name_native_function(diagnosis: Diagnosis, function: str) -> Diagnosis:
    """Return a diagnosis with the function in C that holds the interpreter lock, where it reports such."""
    if not function:
        return diagnosis
    return dataclasses.replace(diagnosis, claim=diagnosis.claim.replace(HELD, f"{HELD} ({function})", 1))


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


def _ended(obs: Observation) -> Diagnosis:
    where = f" at step {obs.state.step}, {in_phase(obs.phase)}" if obs.state is not None else ""
    return Diagnosis(
        DiagnosisKind.DEAD,
        obs.phase,
        f"DEAD: rank {obs.rank} {obs.ended}{where}",
        refuted_if="the process with that id still runs the script",
        next_check="read the system log (dmesg) and the last lines that the rank printed",
        confidence=HIGH,
        rank=obs.rank,
        parameter=obs.last_parameter,
    )


def _stopped(obs: Observation) -> Diagnosis:
    pid = obs.state.pid if obs.state is not None else 0
    return Diagnosis(
        DiagnosisKind.STOPPED,
        obs.phase,
        f"STOPPED: rank {obs.rank} (process {pid}) is stopped by a signal or a debugger",
        refuted_if=f"the state of process {pid} in /proc/{pid}/stat is not T",
        next_check=f"continue it with `kill -CONT {pid}`",
        confidence=HIGH,
        rank=obs.rank,
        parameter=obs.last_parameter,
    )


def _slow(obs: Observation, state: StateSnapshot) -> Diagnosis:
    rate, remaining_s = estimate_speed(obs.snapshots)
    recomputed = obs.graph_build.recomputed if obs.graph_build is not None else 0
    if state.nodes_done > 0 and state.nodes_total > 0:
        parts = [f"backward {state.nodes_done:,} of {state.nodes_total:,} nodes"]
    elif state.nodes_total:
        parts = [f"backward of {state.nodes_total:,} nodes, position not known"]
    else:
        parts = ["backward"]
    if recomputed:
        # One node of the graph may stand for any number of recomputed nodes.
        parts.append(f"{recomputed:,} nodes recomputed so far, remaining time not known")
    elif rate:
        speed = f"{rate / 1e3:.1f}k/s" if rate >= 1e3 else f"{rate:.0f}/s"
        parts.append(speed if remaining_s is None else f"{speed}, ETA {remaining_s:.0f} s")
    parts += [f"{state.phase_s:.0f} s so far", *_parameter_words(obs)]
    if state.node and state.node_calls:
        parts.append(f"{state.node_calls:,} custom functions so far, now {_class_name(state.node)}")
    share = find_largest_share(obs.graph_build)
    origin = share.words if share is not None else "the line that made the nodes is not known"
    after = "the line that makes most nodes"
    if share is not None:
        after = f"{Path(share.file).name}:{share.line}, so that it makes fewer nodes"
    return Diagnosis(
        DiagnosisKind.SLOW,
        Phase.BACKWARD,
        f"SLOW, not hung: {', '.join(parts)}; {origin}",
        refuted_if="no node finishes any more, and none is recomputed, for as long as it has run now"
        if recomputed
        else "no node finishes any more for as long as the ETA",
        next_check=f"wait for the ETA; then change {after}"
        if share
        else f"wait for the ETA; then find {after}",
        confidence=HIGH if rate or recomputed else MEDIUM,
        rank=obs.rank,
        line=f"{share.file}:{share.line}" if share is not None else None,
        parameter=obs.last_parameter,
        module=_class_name(state.node) or None,
    )


def estimate_speed(snapshots: Iterable[StateSnapshot]) -> tuple[float | None, float | None]:
    """Return nodes per second and the remaining seconds of a backward pass, None where not known."""
    known = [s for s in snapshots if s.nodes_done > 0]
    if not known:
        return None, None
    newest = known[-1]
    earlier = [s for s in known if s.phase_since == newest.phase_since and s.nodes_done < newest.nodes_done]
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


def _in_collective(obs: Observation, state: StateSnapshot, summary: StackSummary) -> Diagnosis:
    call, frame = state.current_call, summary.frame
    where = f", called at {frame.location} in {frame.qualified_name}" if frame is not None else ""
    text = call.text if call is not None else "a collective"
    return Diagnosis(
        DiagnosisKind.BLOCKED,
        state.phase,
        f"BLOCKED: rank {obs.rank} waits in {text}{where}; {state.silence_s:.0f} s",
        refuted_if="the call returns without another rank having done anything",
        next_check="find out what the ranks do that are not in this call",
        confidence=HIGH if call is not None else MEDIUM,
        rank=obs.rank,
        line=None if frame is None else str(frame),
        parameter=obs.last_parameter,
        waits=True,
    )


def _for_cause(obs: Observation, cause: WaitCause, state: StateSnapshot, summary: StackSummary) -> Diagnosis:
    frame = summary.frame
    where = f"; at {frame.location} in {frame.qualified_name}" if frame is not None else ""
    return Diagnosis(
        DiagnosisKind.BLOCKED,
        state.phase,
        f"BLOCKED: rank {obs.rank} makes no progress: {cause.words}{where}; {state.silence_s:.0f} s",
        refuted_if="it moves on by itself, so that what it waits for was only slow",
        next_check=cause.fix,
        confidence=HIGH,
        rank=obs.rank,
        line=None if frame is None else str(frame),
        parameter=obs.last_parameter,
    )


def _synchronizes(obs: Observation, state: StateSnapshot, summary: StackSummary, limits: StallLimits) -> bool:
    """Return whether the host waits for a collective or a device, in the same call in every sample."""
    called = {thread.called for thread in summary.threads}
    if len(called) != 1 or not summary.same_line or summary.runs_bytecode:
        return False
    name = called.pop()
    # The driver of a device may wait without sleeping.
    return (name == "wait" and is_idle(obs, limits)) or (state.device and name in SYNCHRONIZING)


def _in_synchronization(obs: Observation, state: StateSnapshot, summary: StackSummary) -> Diagnosis:
    frame = summary.frame
    call = f"{summary.threads[-1].called}()"
    where = f" at {frame.location} in {frame.qualified_name}" if frame is not None else ""
    return Diagnosis(
        DiagnosisKind.BLOCKED,
        state.phase,
        f"BLOCKED: rank {obs.rank} waits in {call}{where} for {obs.pending}; {state.silence_s:.0f} s",
        refuted_if="that collective has completed, so that the wait is for something else",
        next_check="find out what the ranks do that have not issued this collective",
        confidence=MEDIUM,
        rank=obs.rank,
        line=None if frame is None else str(frame),
        parameter=obs.last_parameter,
        waits=True,
    )


def _outside_backward(
    obs: Observation, state: StateSnapshot, summary: StackSummary, limits: StallLimits
) -> Diagnosis:
    phase, frame = state.phase, summary.frame
    if phase in {Phase.OTHER, Phase.FORWARD, Phase.LOSS} and summary.thread is not None:
        shown = stacks.phase_of(summary.thread)
        phase = phase if shown in {None, Phase.BACKWARD} else shown
    words = {
        Phase.DATA: "waiting for data",
        Phase.OTHER: "between steps",
        Phase.LOSS: "between forward and backward",
    }.get(phase, f"in {phase}")
    parts = [f"{words} for {state.silence_s:.0f} s", *_cpu_words(obs)]
    if frame is not None:
        when = "in every sample" if summary.same_line else "now"
        parts.append(f"{when} at {frame.location} in {frame.qualified_name}")
    if obs.wait and is_idle(obs, limits):
        parts.append(f"it {wait_words(obs.wait)}")
    if obs.workers and phase is Phase.DATA:
        parts.append(obs.workers)
    return Diagnosis(
        DiagnosisKind.PHASE,
        phase,
        f"PHASE {phase}: step {state.step} does not reach backward: {'; '.join(parts)}",
        refuted_if=f"the step leaves {phase} by itself",
        next_check="time the data loader alone" if phase is Phase.DATA else "read the code at that line",
        confidence=HIGH if summary.same_line else MEDIUM,
        rank=obs.rank,
        line=None if frame is None else str(frame),
    )


def _in_backward(
    obs: Observation, state: StateSnapshot, summary: StackSummary, limits: StallLimits
) -> Diagnosis:
    tail = "; ".join([*_cpu_words(obs), f"{state.silence_s:.0f} s", *_parameter_words(obs)])
    frame = None if summary.native else summary.frame
    known = Diagnosis(
        DiagnosisKind.UNKNOWN,
        state.phase,
        "",
        "",
        "",
        rank=obs.rank,
        line=str(frame) if frame is not None and summary.same_function else None,
        parameter=obs.last_parameter,
        module=_class_name(state.node) if state.node_since else None,
    )
    inside = f" in {frame.qualified_name}, {frame.location}" if frame is not None else ""
    # It seems to wait for a lock, but wakes all the time while its process computes.
    computes = obs.cpu is not None and obs.cpu >= limits.busy
    if computes and obs.wait == "a lock" and (obs.slices_per_s or 0.0) >= COMPETES_PER_S:
        return _unknown(known, "it is starved of the interpreter lock by other threads of the process", tail)
    if is_idle(obs, limits):
        return _blocked(obs, state, summary, known, inside, tail)
    if is_starved(obs.thread_cpu, obs.scheduled):
        return _unknown(known, STARVED, tail)
    if not _is_busy(obs, limits):
        return _unknown(known, "it neither waits nor computes without a pause", tail)
    if summary.native:
        return _busy_in_native_code(obs, state, known, tail)
    if not (summary.same_line or (summary.same_function and state.node_since)):
        return _unknown(known, "its stacks differ, or too few could be taken", tail)
    if summary.runs_bytecode or obs.holds_interpreter:
        held = "" if summary.runs_bytecode else HELD
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.SPIN,
            claim=f"SPIN: {_thread_words(summary, state)} computes{inside}{held}, without progress; {tail}",
            refuted_if="the call at that line returns",
            next_check=f"find out what ends the loop at {known.line}",
            confidence=HIGH if summary.same_line else MEDIUM,
        )
    if summary.runs_bytecode is False:
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.LONG_OP,
            claim=f"LONG_OP: one native call{inside} computes; {tail}",
            refuted_if="a profile shows that the line is reached many times",
            next_check=f"check the sizes of the operands at {known.line}",
            confidence=MEDIUM,
        )
    return _unknown(known, "whether it runs Python or native code is not known", tail)


def _blocked(
    obs: Observation, state: StateSnapshot, summary: StackSummary, known: Diagnosis, inside: str, tail: str
) -> Diagnosis:
    if state.device and not (state.node_since and obs.wait in {"a lock", "a sleep"}):
        return _unknown(known, "the host waits; whether the device computes is not observable", tail)
    node = f" in {_class_name(state.node)}" if state.node_since and not inside else ""
    where = inside if summary.same_line else node
    words = wait_words(obs.wait)
    for_ranks = summary.native and state.world_size > 1
    if for_ranks:
        words = f"waits in native code of backward, where it waits for {obs.reducing}"
    if obs.samples and obs.holds_interpreter and not summary.native:
        words += HELD
    if not summary.same_line and not summary.native and summary.threads:
        where = f"{where or inside} (not the same line in every sample)"
    return dataclasses.replace(
        known,
        kind=DiagnosisKind.BLOCKED,
        claim=f"BLOCKED: {_thread_words(summary, state)} {words}{where}; {tail}",
        refuted_if="it moves on by itself, so that what it waits for was only slow",
        next_check=f"find out what should end this wait{': ' + known.line if known.line else ''}",
        confidence=HIGH if summary.same_line and inside else MEDIUM,
        waits=for_ranks,
    )


def _busy_in_native_code(obs: Observation, state: StateSnapshot, known: Diagnosis, tail: str) -> Diagnosis:
    """Diagnose a backward pass in native code: one long operation, or many of which none has ended."""
    operations = [op for sample in obs.native_samples if (op := stacks.native_operation(sample)) is not None]
    named = operations[0] if len(operations) >= 2 and len(set(operations)) == 1 else None
    # Inside a custom function it may be a backward pass of its own, whose nodes are not known.
    nested = bool(state.node_since) or (obs.graph_build is not None and obs.graph_build.recomputed > 0)
    close = state.position_hooks > 0 and state.nodes_total <= 4 * state.position_hooks
    if not nested and (close or (named and state.nodes_total and state.nodes_total <= 8)):
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.LONG_OP,
            module=named,
            claim=f"LONG_OP: backward computes in {named or 'one native operation'}; {tail}",
            refuted_if="native stacks of two moments show different operations",
            next_check="check the sizes of its inputs and the number of threads",
            confidence=HIGH if named else MEDIUM,
        )
    why = "native code computes; one long operation and many short ones are not distinguishable here"
    return _unknown(known, f"{why} (both samples show {named})" if named else why, tail)


def _unknown(known: Diagnosis, why: str, tail: str) -> Diagnosis:
    return dataclasses.replace(
        known,
        claim=f"UNKNOWN: backward did not finish in the time given; {why}; {tail}",
        refuted_if="a later sample decides",
        next_check="take native stacks: install py-spy and allow tracing, or run `backlight attach PID`",
        confidence=LOW,
    )


def _used_cpu(obs: Observation) -> float | None:
    return obs.thread_cpu if obs.thread_cpu is not None else obs.cpu


def is_idle(obs: Observation, limits: StallLimits) -> bool:
    """Return whether a process used no core and queued for none."""
    used = _used_cpu(obs)
    queues = obs.scheduled is not None and obs.scheduled > MAX_IDLE_SCHEDULED
    return used is not None and used <= limits.idle and not queues and (obs.cpu is None or obs.cpu <= 1.0)


def _is_busy(obs: Observation, limits: StallLimits) -> bool:
    used = _used_cpu(obs)
    # On an overloaded machine a thread that computes also queues.
    queues = obs.scheduled is not None and obs.scheduled >= limits.busy
    return used is not None and (used >= limits.busy or (used > limits.idle and queues))


def wait_words(reason: str) -> str:
    """Return in words that a thread waits for ``reason``, which may be empty."""
    return "sleeps" if reason == "a sleep" else f"waits for {reason}" if reason else "waits"


def _thread_words(summary: StackSummary, state: StateSnapshot) -> str:
    thread = summary.thread
    if thread is None or thread.ident == state.main_ident or thread.name == "MainThread":
        return "the main thread"
    return f"thread {thread.name or hex(thread.ident)}"


def _cpu_words(obs: Observation) -> list[str]:
    used = _used_cpu(obs)
    return [] if used is None else [f"CPU {100 * used:.0f} %"]


def _parameter_words(obs: Observation) -> list[str]:
    state = obs.state
    if state is None or not state.expected or state.phase is not Phase.BACKWARD:
        return []
    name = obs.last_parameter
    if name is None or not state.reached:
        return [f"no parameter reached yet (of {state.expected})"]
    return [f"last parameter reached: {name} ({state.reached} of {state.expected})"]


def _class_name(node: str) -> str:
    return node.removesuffix("Backward")
