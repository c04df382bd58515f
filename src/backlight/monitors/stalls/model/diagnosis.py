"""The verdict on one process, as a pure function of what was observed. No torch, no process is touched here.

The order of the questions is that of the formulas of this monitor: dead, stopped, moving, then what an idle
or
a busy process shows. What the observations do not decide is UNKNOWN: a wrong verdict is worse than none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from backlight.monitors.stalls.model import graph_samples, stacks
from backlight.monitors.stalls.model.observation import HIGH, LOW, MEDIUM, Diagnosis, Observation, in_phase
from backlight.monitors.stalls.model.shared_state import State, StateSnapshot
from backlight.monitors.stalls.model.stacks import Frame, StackSample, ThreadStack
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.timeouts import EXEMPT_PHASES, timeout_s
from backlight.records import DiagnosisKind, Phase

MOVES = 3
"""Different counts of progress that must have been seen before something is said to move."""

NO_NEWS = 2.0
"""Times its longest pause so far that a silence may last without being one."""

NO_PAUSE = 0.3
"""Seconds of silence that are none: readings of the board are that far apart."""

STARVED = 0.2
"""Share of the time in a queue for a processor, or on one, above which a thread does not just wait."""

COMPETES = 50.0
"""Times per second that a thread is put on a processor, above which it does not just wait for a lock."""


@dataclass(frozen=True)
class StackSummary:
    """What the stacks say, all looks together."""

    threads: tuple[ThreadStack, ...]
    same_line: bool
    same_function: bool
    frame: Frame | None
    native: bool
    turns: bool | None

    @property
    def thread(self) -> ThreadStack | None:
        """The working thread in the newest look."""
        return self.threads[-1] if self.threads else None


def diagnose(observation: Observation, limits: Thresholds, allowed: float | None = None) -> Diagnosis | None:
    """Return the verdict on a process, or None where there is nothing to say of it.

    Parameters
    ----------
    view:
        What was observed.
    limits:
        Thresholds of the monitor.
    allowed:
        Patience to apply in place of the process's own, when others wait for it.
    """
    board = observation.board
    if observation.ended:
        return _ended(observation)
    if observation.stopped:
        return _stopped(observation)
    if board is None:
        return None
    own = timeout_s(board, limits)
    if board.state in {State.FINISHED, State.FAILED} or (board.phase in EXEMPT_PHASES and not board.inside):
        return None
    allowed = own if allowed is None else allowed
    if allowed is None:
        return None
    seen = summarize_stacks(observation, limits)
    if seen.thread is not None and (
        stacks.is_compiling(seen.thread)
        or (board.phase is not Phase.BACKWARD and stacks.phase_of(seen.thread) in EXEMPT_PHASES)
    ):
        return None
    if board.phase is Phase.BACKWARD and is_moving(board, allowed):
        return (
            _slow(observation, board)
            if board.phase_s > allowed and is_steady(observation, board.phase_since)
            else None
        )
    if board.silence_s < allowed:
        return None
    if board.current_call is not None or (seen.thread is not None and stacks.in_collective(seen.thread)):
        return _collective(observation, board, seen)
    if board.phase is not Phase.BACKWARD:
        return _phase(observation, board, seen, limits)
    return _stuck(observation, board, seen, limits)


def is_moving(board: StateSnapshot, allowed: float) -> bool:
    """Tell whether the last beat is recent, measured by the patience."""
    return board.silence_s < 0.5 * allowed


def is_steady(observation: Observation, since: int) -> bool:
    """Tell whether a process was seen to move again and again since a moment.

    Its silence now must be no news beside the pauses that it made before: a step that stops right after some
    beats has moved a moment ago as well.
    """
    heartbeats: dict[int, int] = {}
    for board in observation.history or observation.snapshots:
        if board.heartbeat >= since:
            heartbeats.setdefault(board.progress, board.heartbeat)
    times = sorted(heartbeats.values())
    if observation.board is None or len(times) < MOVES:
        return False
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    return observation.board.silence_s <= max(NO_NEWS * max(pauses) / 1e9, NO_PAUSE)


def summarize_stacks(observation: Observation, limits: Thresholds) -> StackSummary:
    """Read the looks of the present phase: the working thread in each, and what stays the same."""
    board = observation.board
    ident = 0
    since = 0
    if board is not None:
        ident = (
            board.backward_ident
            if board.phase is Phase.BACKWARD and board.backward_ident
            else board.main_ident
        )
        since = max(board.phase_since, board.heartbeat)
    samples = [sample for sample in observation.samples if sample.at >= since]
    threads = [stacks.find_working_thread(sample, ident) for sample in samples]
    if not any(threads):
        threads = [sample.threads[-1] for sample in samples if sample.threads]
    known = tuple(t for t in threads if t is not None)
    enough = len(known) >= limits.samples and (samples[-1].at - samples[0].at) / 1e9 >= limits.window
    frames = [stacks.place(t) for t in known]
    newest = frames[-1] if frames else None
    turns = [t.runs_bytecode for t in known if t.runs_bytecode is not None]
    return StackSummary(
        threads=known,
        same_line=enough and all(f == newest for f in frames),
        same_function=enough
        and newest is not None
        and all(f is not None and (f.file, f.function) == (newest.file, newest.function) for f in frames),
        frame=newest,
        native=bool(known) and all(stacks.in_native_backward(t) for t in known),
        turns=True if any(turns) else False if 3 * len(turns) >= 2 * len(known) and turns else None,
    )


def _ended(observation: Observation) -> Diagnosis:
    board = observation.board
    where = f" at step {board.step}, {in_phase(board.phase)}" if board is not None else ""
    return Diagnosis(
        DiagnosisKind.DEAD,
        board.phase if board is not None else Phase.OTHER,
        f"DEAD: rank {observation.rank} {observation.ended}{where}",
        refuted_if="the process with that id still runs the training",
        next_check="look at the system log (dmesg) and at the last lines that the rank printed",
        confidence=HIGH,
        rank=observation.rank,
        parameter=observation.last_parameter,
    )


def _stopped(observation: Observation) -> Diagnosis:
    board = observation.board
    pid = board.pid if board is not None else 0
    return Diagnosis(
        DiagnosisKind.STOPPED,
        board.phase if board is not None else Phase.OTHER,
        f"STOPPED: rank {observation.rank} (process {pid}) is stopped by a signal or a debugger",
        refuted_if=f"the state of process {pid} in /proc/{pid}/stat is not T",
        next_check=f"kill -CONT {pid} lets it go on",
        confidence=HIGH,
        rank=observation.rank,
        parameter=observation.last_parameter,
    )


def _slow(observation: Observation, board: StateSnapshot) -> Diagnosis:
    rate, remaining = speed(observation.snapshots)
    again = observation.graph_build.again if observation.graph_build is not None else 0
    parts = []
    if board.percent is not None:
        parts.append(f"backward {board.nodes_done:,} of {board.nodes_total:,} nodes")
    elif board.nodes_total:
        parts.append(f"backward of {board.nodes_total:,} nodes, position not known")
    else:
        parts.append("backward")
    if again:
        # One node of the graph may stand for any number of nodes that it makes again.
        parts.append(f"{again:,} nodes made again by recomputation so far, time left not known")
    elif rate:
        parts.append(
            f"{_short(rate)}/s, ETA {remaining:.0f} s" if remaining is not None else f"{_short(rate)}/s"
        )
    parts += [f"{board.phase_s:.0f} s so far", *_parameter_words(observation)]
    if board.node and board.node_calls:
        parts.append(f"{board.node_calls:,} custom functions so far, now {_bare(board.node)}")
    maker = graph_samples.find_largest_share(observation.graph_build)
    parts.append(maker.words if maker is not None else "which line made the nodes is not known")
    return Diagnosis(
        DiagnosisKind.SLOW,
        Phase.BACKWARD,
        f"SLOW, not hung: {', '.join(parts[:-1])}; {parts[-1]}",
        refuted_if="no node finishes any more, and none is made again, for as long as it has run now"
        if again
        else "no node finishes any more for as long as the ETA says",
        next_check=f"wait for the ETA; then have {Path(maker.file).name}:{maker.line} make fewer nodes"
        if maker is not None
        else "wait for the ETA; then look at which line makes the most nodes",
        confidence=HIGH if rate or again else MEDIUM,
        rank=observation.rank,
        line=f"{maker.file}:{maker.line}" if maker is not None else None,
        parameter=observation.last_parameter,
        module=_bare(board.node) or None,
    )


def speed(snapshots: Iterable[StateSnapshot]) -> tuple[float | None, float | None]:
    """Return nodes per second and the seconds that are left, None where they are not known."""
    known = [b for b in snapshots if b.nodes_done > 0]
    if not known:
        return None, None
    newest = known[-1]
    same = [b for b in known if b.phase_since == newest.phase_since and b.nodes_done < newest.nodes_done]
    if same:
        rate = (newest.nodes_done - same[0].nodes_done) / max(
            (newest.heartbeat - same[0].heartbeat) / 1e9, 1e-9
        )
    elif newest.phase_s > 0:
        rate = newest.nodes_done / max((newest.heartbeat - newest.phase_since) / 1e9, 1e-9)
    else:
        return None, None
    left = max(newest.nodes_total - newest.nodes_done, 0) / rate if rate > 0 and newest.nodes_total else None
    return rate, left


def _collective(observation: Observation, board: StateSnapshot, seen: StackSummary) -> Diagnosis:
    call = board.current_call.text if board.current_call is not None else "a collective"
    where = f", called at {seen.frame.place} in {seen.frame.method}" if seen.frame is not None else ""
    return Diagnosis(
        DiagnosisKind.BLOCKED,
        board.phase,
        f"BLOCKED: rank {observation.rank} waits in {call}{where}; {board.silence_s:.0f} s",
        refuted_if="the call returns without another rank having done anything",
        next_check="see what the ranks that are not in this call are doing",
        confidence=HIGH if board.current_call is not None else MEDIUM,
        rank=observation.rank,
        line=_line(seen.frame),
        parameter=observation.last_parameter,
        waits=True,
    )


def _phase(
    observation: Observation, board: StateSnapshot, seen: StackSummary, limits: Thresholds
) -> Diagnosis:
    phase = board.phase
    if phase in {Phase.OTHER, Phase.FORWARD, Phase.LOSS} and seen.thread is not None:
        phase = stacks.phase_of(seen.thread) or phase
    if phase is Phase.BACKWARD:
        phase = board.phase
    words = {
        Phase.DATA: "waiting for data",
        Phase.OTHER: "between steps",
        Phase.LOSS: "between forward and backward",
    }.get(phase, f"in {phase}")
    parts = [f"{words} for {board.silence_s:.0f} s", *_cpu_words(observation)]
    if seen.frame is not None:
        again = "in every look" if seen.same_line else "now"
        parts.append(f"{again} at {seen.frame.place} in {seen.frame.method}")
    if observation.wait and _idle(observation, limits):
        parts.append(f"it {_waits(observation)}")
    if observation.workers and phase is Phase.DATA:
        parts.append(observation.workers)
    return Diagnosis(
        DiagnosisKind.PHASE,
        phase,
        f"PHASE {phase}: step {board.step} does not reach backward: {'; '.join(parts)}",
        refuted_if=f"the step leaves {phase} by itself",
        next_check="read what stands at that line" if phase is not Phase.DATA else "time the data alone",
        confidence=HIGH if seen.same_line else MEDIUM,
        rank=observation.rank,
        line=_line(seen.frame),
    )


def _stuck(
    observation: Observation, board: StateSnapshot, seen: StackSummary, limits: Thresholds
) -> Diagnosis:
    tail = [*_cpu_words(observation), f"{board.silence_s:.0f} s", *_parameter_words(observation)]
    known = _known(observation, board, seen)
    inside = (
        f" in {seen.frame.method}, {seen.frame.place}" if seen.frame is not None and not seen.native else ""
    )
    node = f" in {_bare(board.node)}" if board.node_since and not inside else ""
    if _competes(observation, limits):
        return _unknown(known, "other threads of the process keep the interpreter lock from it", tail)
    if _idle(observation, limits):
        if board.device and not (board.node_since and observation.wait in {"a lock", "a sleep"}):
            return _unknown(known, "the host waits; whether the device computes is not seen from here", tail)
        who = _who(seen, board)
        where = inside if seen.same_line else node
        doing = _waits(observation)
        if seen.native and board.world > 1:
            doing = f"waits in native code of backward, where it waits for {observation.reducing}"
        if not seen.same_line and not seen.native and seen.threads:
            where = f"{where or inside} (not the same line in every look)"
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.BLOCKED,
            claim=f"BLOCKED: {who} {doing}{where}; {'; '.join(tail)}",
            refuted_if="it moves on by itself: then what it waits for was only slow",
            next_check=f"find who should let it go on{': ' + known.line if known.line else ''}",
            confidence=HIGH if seen.same_line and inside else MEDIUM,
            waits=seen.native and board.world > 1,
        )
    if not _busy(observation, limits):
        return _unknown(known, "it neither waits nor computes without a pause", tail)
    if seen.native:
        return _native(observation, known, limits, tail)
    if not (seen.same_line or (seen.same_function and board.node_since)):
        return _unknown(known, "its stacks differ, or too few could be taken", tail)
    silent = all(sample.source != "sampler" for sample in observation.samples if sample.at >= board.heartbeat)
    if seen.turns or silent:
        held = " in C code that holds the interpreter lock" if silent and not seen.turns else ""
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.SPIN,
            claim=f"SPIN: {_who(seen, board)} computes{inside}{held}, without progress; {'; '.join(tail)}",
            refuted_if="the call at that line returns",
            next_check=f"read the loop at {known.line}: what ends it?",
            confidence=HIGH if seen.same_line else MEDIUM,
        )
    if seen.turns is False:
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.LONG_OP,
            claim=f"LONG_OP: one native call{inside} computes; {'; '.join(tail)}",
            refuted_if="a profile shows that the line is reached many times",
            next_check=f"look at the sizes of what {known.line} works on",
            confidence=MEDIUM,
        )
    return _unknown(known, "whether it runs Python or native code is not seen", tail)


def _native(observation: Observation, known: Diagnosis, limits: Thresholds, tail: list[str]) -> Diagnosis:
    """Judge a backward in native code: one long operation, or many of which none was seen to end."""
    board = observation.board
    assert board is not None
    operations = [op for sample in observation.native if (op := native_operation(sample)) is not None]
    named = operations[0] if operations and len(set(operations)) == 1 and len(operations) >= 2 else None
    # Inside a custom function it may be a backward of its own, of whose nodes nothing is known.
    nested = bool(board.node_since) or (
        observation.graph_build is not None and observation.graph_build.again > 0
    )
    close = board.hooks > 0 and board.nodes_total <= 4 * board.hooks
    if not nested and (close or (named and board.nodes_total and board.nodes_total <= 8)):
        return dataclasses.replace(
            known,
            kind=DiagnosisKind.LONG_OP,
            module=named,
            claim=f"LONG_OP: backward computes in {named or 'one native operation'}; {'; '.join(tail)}",
            refuted_if="native stacks of two moments show different operations",
            next_check="look at the sizes of its inputs and at the number of threads",
            confidence=HIGH if named else MEDIUM,
        )
    why = "native code computes; one long operation and many short ones cannot be told apart here"
    if named:
        why += f" (both looks show {named})"
    return _unknown(known, why, tail)


def native_operation(sample: StackSample) -> str | None:
    """Return the innermost autograd node among the native frames of a look."""
    for thread in sample.threads:
        if not any(f.function.endswith("_engine_run_backward") for f in thread.frames):
            continue
        for name in thread.native:
            bare = name.split("(")[0]
            if bare.endswith("::apply") and "Backward" in bare:
                return bare.split("::")[-2]
    return None


def _known(observation: Observation, board: StateSnapshot, seen: StackSummary) -> Diagnosis:
    frame = None if seen.native else seen.frame
    return Diagnosis(
        DiagnosisKind.UNKNOWN,
        board.phase,
        "",
        "",
        "",
        rank=observation.rank,
        line=_line(frame) if seen.same_function else None,
        parameter=observation.last_parameter,
        module=_bare(board.node) if board.node_since else None,
    )


def _unknown(known: Diagnosis, why: str, tail: list[str]) -> Diagnosis:
    return dataclasses.replace(
        known,
        kind=DiagnosisKind.UNKNOWN,
        claim=f"UNKNOWN: backward did not finish in the time given; {why}; {'; '.join(tail)}",
        refuted_if="a further look decides",
        next_check="take native stacks: install py-spy and allow tracing, or run `backlight attach PID`",
        confidence=LOW,
    )


def _idle(observation: Observation, limits: Thresholds) -> bool:
    used = observation.own_cpu if observation.own_cpu is not None else observation.cpu
    starved = observation.wanted is not None and observation.wanted > STARVED
    return (
        used is not None
        and used <= limits.idle
        and not starved
        and (observation.cpu is None or observation.cpu <= 1.0)
    )


def _competes(observation: Observation, limits: Thresholds) -> bool:
    """Tell whether a thread that seems to wait for a lock wakes all the time while its process computes."""
    busy = observation.cpu is not None and observation.cpu >= limits.busy
    return (
        busy
        and observation.wait == "a lock"
        and observation.turns is not None
        and observation.turns >= COMPETES
    )


def _busy(observation: Observation, limits: Thresholds) -> bool:
    used = observation.own_cpu if observation.own_cpu is not None else observation.cpu
    if used is None:
        return False
    # On a machine with too much to do a thread that computes queues for most of the time.
    often = observation.runnable is not None and observation.runnable >= 0.8
    wants = observation.wanted is not None and observation.wanted >= limits.busy
    return used >= limits.busy or (used > limits.idle and (often or wants))


def _waits(observation: Observation) -> str:
    if observation.wait == "a sleep":
        return "sleeps"
    return f"waits for {observation.wait}" if observation.wait else "waits"


def _who(seen: StackSummary, board: StateSnapshot) -> str:
    thread = seen.thread
    if thread is None or thread.ident == board.main_ident or thread.name == "MainThread":
        return "the main thread"
    return f"thread {thread.name or hex(thread.ident)}"


def _cpu_words(observation: Observation) -> list[str]:
    used = observation.own_cpu if observation.own_cpu is not None else observation.cpu
    return [] if used is None else [f"CPU {100 * used:.0f} %"]


def _parameter_words(observation: Observation) -> list[str]:
    board = observation.board
    if board is None or not board.expected or board.phase is not Phase.BACKWARD:
        return []
    name = observation.last_parameter
    if name is None or not board.reached:
        return [f"no parameter reached yet (of {board.expected})"]
    return [f"last parameter reached: {name} ({board.reached} of {board.expected})"]


def _line(frame: Frame | None) -> str | None:
    return f"{frame.file}:{frame.line}" if frame is not None else None


def _bare(node: str) -> str:
    return node.removesuffix("Backward")


def _short(rate: float) -> str:
    return f"{rate / 1e3:.1f}k" if rate >= 1e3 else f"{rate:.0f}"
