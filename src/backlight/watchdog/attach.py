"""Diagnosis of a running process from outside. No torch.

A watched process has a shared state and is diagnosed as by its watchdog. Of any other process the kernel
reports states and CPU times, and py-spy the stacks, where it is installed and tracing is permitted.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from backlight import clock, processes
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog import runtime_dir, stacks
from backlight.watchdog.diagnosis import (
    HELD,
    STARVED,
    diagnose,
    diagnose_cause,
    is_idle,
    name_native_function,
    wait_words,
)
from backlight.watchdog.named_waits import WaitCause, find_named_wait, variables_of
from backlight.watchdog.observation import HIGH, LOW, MEDIUM, Diagnosis
from backlight.watchdog.rank_observer import RankObserver
from backlight.watchdog.rank_processes import ProcessNotFoundError
from backlight.watchdog.shared_state import read_state
from backlight.watchdog.stack_summary import is_starved
from backlight.watchdog.stacks import StackSample, ThreadStack
from backlight.watchdog.timeouts import StallLimits
from backlight.watchdog.wait_causes import name_wait

DURATION_S = 2.0
"""Time over which a process is observed."""

NUM_SAMPLES = 4
MAX_IDLE_CORES = 0.05
"""Cores below which a process only waits; launchers that poll stay below it."""

POLL_S = 0.15


@dataclass(frozen=True)
class Attached:
    """Result of :func:`attach`."""

    pid: int
    diagnosis: Diagnosis
    threads: str  # a table
    samples: tuple[StackSample, ...]
    unseen: tuple[str, ...]  # what is not observable, and why
    spins: bool = False  # the main thread ran, and held the interpreter lock on one line in every sample
    idle: bool = False  # it used no core and queued for none
    cause: WaitCause | None = None  # of its wait, where that has a name
    moves: bool = False  # the stack of the main thread changed between samples, or it is watched and moves


def attach(pid: int, duration_s: float = DURATION_S, *, native: bool = True) -> Attached:
    """Observe a process for some seconds and diagnose what it does.

    ``native``: also take native stacks at the end, which pauses the process for a moment.

    Raises
    ------
    ProcessNotFoundError
        If there is no such process.
    """
    process = processes.read_process(pid)
    if process is None:
        raise ProcessNotFoundError(f"attach: no process {pid}; expected the id of a running process")
    watched = _find_state(pid)
    if watched is not None:
        return _attach_watched(pid, *watched, duration_s, native=native)
    unseen = [
        "steps, phases, autograd nodes and parameters: the process was not started by backlight",
        "collectives of the ranks: only their Python lines",
    ]
    if not processes.is_traceable(pid):
        unseen.append("what its threads wait for in the kernel: tracing is denied")
    if process.is_dead or process.is_stopped:
        threads = processes.format_threads(pid)
        return Attached(pid, _diagnose_ended(process), threads, (), tuple(unseen))
    samples: list[StackSample] = []
    before, begin = _threads(pid), clock.monotonic()
    for _ in range(NUM_SAMPLES):
        sample, reason = stacks.dump_by_py_spy(pid)
        if sample is None:
            unseen.append(f"Python stacks: {reason}")
            clock.sleep(duration_s)
            break
        samples.append(sample)
        clock.sleep(duration_s / NUM_SAMPLES)
    after, passed = _threads(pid), clock.monotonic() - begin
    natives: list[StackSample] = []
    if native and samples:
        sample, reason = stacks.dump_by_py_spy(pid, native=True)
        if sample is None:
            unseen.append(f"native stacks: {reason}")
        else:
            natives.append(sample)
    # Of threads that are new, their whole time counts.
    cpu = {
        tid: (t.cpu_s - (before[tid].cpu_s if tid in before else 0.0)) / passed for tid, t in after.items()
    }
    starved = False
    if pid in before and pid in after and after[pid].slices:
        ran = (after[pid].ran_ns - before[pid].ran_ns) / 1e9 / passed
        starved = is_starved(ran, ran + (after[pid].queued_ns - before[pid].queued_ns) / 1e9 / passed)
    diagnosis, cause = _diagnose_unwatched(pid, samples, natives, cpu, starved=starved), None
    if diagnosis.kind in {DiagnosisKind.BLOCKED, DiagnosisKind.UNKNOWN}:
        cause = _find_cause(pid, samples, natives) if samples else name_wait(pid, pid, None)
        if cause is not None:
            diagnosis = _for_cause(diagnosis, cause)
    main = [main_thread(sample, pid) for sample in samples]
    # The whole stack: the user's line alone also stays the same throughout a long import.
    held = {thread.frames if thread is not None and thread.holds_gil else None for thread in main}
    spins = len(samples) > 1 and len(held) == 1 and None not in held and not starved
    idle = sum(cpu.values()) <= MAX_IDLE_CORES and not starved
    shown = (*samples[-1:], *natives)
    threads = processes.format_threads(pid)
    moves = len({thread.frames for thread in main if thread is not None}) > 1
    return Attached(
        pid, diagnosis, threads, shown, tuple(unseen), spins=spins, idle=idle, cause=cause, moves=moves
    )


def _diagnose_unwatched(
    pid: int, samples: list[StackSample], natives: list[StackSample], cpu: dict[int, float], *, starved: bool
) -> Diagnosis:
    """Diagnose a process by its stacks and CPU usage (cores by thread) alone, which decides less."""
    threads = [t for sample in samples if (t := main_thread(sample, pid)) is not None]
    used = sum(cpu.values())
    frames = [stacks.user_frame(t) for t in threads]
    frame = frames[-1] if frames else None
    phase = (stacks.phase_of(threads[-1]) if threads else None) or Phase.OTHER
    at = f" at {frame.location} in {frame.qualified_name}" if frame is not None else ""
    function = next((name for s in natives if (name := stacks.native_function(s, pid))), "")
    kind, confidence, refuted_if = DiagnosisKind.UNKNOWN, LOW, "a longer observation decides"
    next_check = "observe it for longer: --seconds 10"
    inside = "" if phase is Phase.OTHER else f"in {phase}"
    if not threads:
        words = "no stacks could be taken"
    elif len(frames) < 3:
        words = f"too few stacks could be taken to see whether it moves{at}"
    elif any(f != frame for f in frames):
        words = f"its stack changes between samples, so it moves{inside and f'; {inside} now'}{at}"
        confidence, refuted_if = MEDIUM, "no step has ended after a while"
    elif starved:
        words = STARVED
    elif used <= MAX_IDLE_CORES:
        doing = wait_words(processes.wait_reason(pid, pid))
        kind, confidence, refuted_if = DiagnosisKind.BLOCKED, HIGH, "it moves on by itself"
        held = HELD if all(t.holds_gil for t in threads) else ""
        words = f"{inside and f'{inside}, '}the main thread {doing}{held}{at}"
        next_check = f"find out what should end this wait{at}"
    elif cpu.get(pid, used) >= 0.6 and stacks.in_native_backward(threads[-1]):
        operation = next((op for sample in natives if (op := stacks.native_operation(sample))), None)
        now = f", now in {operation}" if operation else ""
        words = f"backward computes in native code{now}; whether nodes finish is not observable from outside"
    else:
        words = f"it computes{at} in every sample; "
        words += "an endless loop and a long call are not distinguishable from outside"
        if all(t.holds_gil for t in threads) and function:
            words = f"it computes{HELD}{at} in every sample"
    diagnosis = Diagnosis(
        kind,
        phase,
        f"{kind}: {words}; CPU {100 * used:.0f} %",
        refuted_if,
        next_check=next_check,
        confidence=confidence,
        line=str(frame) if frame is not None else None,
    )
    return name_native_function(diagnosis, function)


def _find_cause(pid: int, samples: list[StackSample], natives: list[StackSample]) -> WaitCause | None:
    """Return what the main thread waits for, where its innermost frames are the same in every sample."""
    threads = [main_thread(sample, pid) for sample in samples]
    stack = threads[-1]
    if stack is None or any(t is None or t.frames[:1] != stack.frames[:1] for t in threads):
        return None
    inside = [f.function for n in natives if (t := main_thread(n, pid)) is not None for f in t.native]
    if find_named_wait(stack) is None and (
        processes.current_call(pid, pid) == (0, 0) or any("builtin_input" in name for name in inside)
    ):
        stack = replace(stack, called="input")
    elif variables_of(stack):
        sample, _ = stacks.dump_by_py_spy(pid, variables=True)
        stack = (main_thread(sample, pid) if sample is not None else None) or stack
    return name_wait(pid, pid, stack)


def _for_cause(diagnosis: Diagnosis, cause: WaitCause) -> Diagnosis:
    """Return a diagnosis with the cause of the wait; what computes elsewhere is waited for, not hung."""
    kind = DiagnosisKind.PASS if cause.progresses else DiagnosisKind.BLOCKED
    at = f" (at {diagnosis.line})" if diagnosis.line else ""
    return replace(
        diagnosis,
        kind=kind,
        claim=f"{kind}: {cause.words}{at}",
        refuted_if="it moves on by itself",
        next_check="attach again later" if cause.progresses else cause.fix,
        confidence=HIGH,
    )


def main_thread(sample: StackSample, pid: int) -> ThreadStack | None:
    """Return the stack of the main thread of a process."""
    return next((t for t in sample.threads if t.tid == pid), sample.threads[0] if sample.threads else None)


def _diagnose_ended(process: processes.Process) -> Diagnosis:
    kind, how = DiagnosisKind.DEAD, f"has {processes.describe_exit(process.exit_status)}"
    next_check = "look at its parent process"
    if process.is_stopped:
        kind, how = DiagnosisKind.STOPPED, "is stopped by a signal or a debugger"
        next_check = f"continue it with `kill -CONT {process.pid}`"
    return Diagnosis(
        kind,
        Phase.OTHER,
        f"{kind}: process {process.pid} {how}",
        refuted_if=f"/proc/{process.pid}/stat shows another state",
        next_check=next_check,
        confidence=HIGH,
    )


def _find_state(pid: int) -> tuple[Path, int] | None:
    for directory in runtime_dir.runtime_directories():
        for rank in runtime_dir.ranks_in(directory):
            with contextlib.suppress(OSError):
                state = read_state(runtime_dir.state_path(directory, rank))
                if state is not None and state.pid == pid:
                    return directory, rank
    return None


def _attach_watched(pid: int, directory: Path, rank: int, duration_s: float, *, native: bool) -> Attached:
    """Diagnose a watched process as its watchdog does, with the duration as the timeout."""
    limits = StallLimits()
    observer = RankObserver(directory, rank, limits)
    request = directory / f"sample-{os.getpid()}"
    try:
        request.touch()
        deadline = clock.monotonic() + duration_s
        while clock.monotonic() < deadline:
            observer.poll(closely=True)
            clock.sleep(POLL_S)
        obs = observer.observe()
        diagnosis = diagnose(obs, limits, duration_s)
        if diagnosis is not None and diagnosis.kind is DiagnosisKind.UNKNOWN and native:
            observer.take_native_samples()
            obs = observer.observe()
            diagnosis = diagnose(obs, limits, duration_s) or diagnosis
        elif diagnosis is not None and HELD in diagnosis.claim and native:
            diagnosis = name_native_function(diagnosis, observer.find_native_function())
    finally:
        request.unlink(missing_ok=True)
        observer.close()
    diagnosis = diagnosis or diagnose_cause(obs, limits)
    if diagnosis is None:
        where = f" (step {obs.state.step}, {obs.phase})" if obs.state is not None else ""
        diagnosis = Diagnosis(
            DiagnosisKind.PASS,
            obs.phase,
            f"PASS: it moves{where}",
            refuted_if="the step does not end",
            next_check="attach again later",
            confidence=MEDIUM,
        )
    shown = (*obs.samples[-1:], *obs.native_samples)
    threads, idle = processes.format_threads(pid), is_idle(obs, limits)
    moves = diagnosis.kind is DiagnosisKind.PASS
    return Attached(
        pid, diagnosis, threads, shown, obs.not_collected, idle=idle, cause=obs.cause, moves=moves
    )


def _threads(pid: int) -> dict[int, processes.Thread]:
    return {thread.tid: thread for thread in processes.read_threads(pid)}
