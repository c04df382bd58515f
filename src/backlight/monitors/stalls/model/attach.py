"""A look into a process that runs already, from outside. No torch.

A process that is watched has a board, and is judged as its sidecar would. Of any other the kernel tells
states and CPU times, and py-spy the stacks, where it is there and tracing is allowed; what cannot be seen
from there is said.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from backlight import processes
from backlight.monitors.stalls.model import runtime_dir, stack_dumps, stacks
from backlight.monitors.stalls.model.diagnosis import diagnose, native_operation
from backlight.monitors.stalls.model.observation import HIGH, LOW, MEDIUM, Diagnosis, Observation
from backlight.monitors.stalls.model.rank_observer import RankObserver
from backlight.monitors.stalls.model.shared_state import read_state
from backlight.monitors.stalls.model.stacks import StackSample, ThreadStack
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.records import DiagnosisKind, Phase

SECONDS = 2.0
"""Time over which a process is looked at."""

LOOKS = 4


class ProcessNotFoundError(ValueError):
    """There is no such process."""


@dataclass(frozen=True)
class Attached:
    """What a look from outside has given."""

    pid: int
    diagnosis: Diagnosis
    threads: str
    samples: tuple[StackSample, ...]
    unseen: tuple[str, ...]
    spins: bool = False
    """Whether the main thread held the interpreter lock on one line in every look."""


def attach(pid: int, seconds: float = SECONDS, *, native: bool = True) -> Attached:
    """Look into a process for some seconds and judge what it does.

    Parameters
    ----------
    pid:
        The process.
    seconds:
        How long to look; a claim about a line needs several looks.
    native:
        Also take native stacks at the end, which pauses the process for a moment.

    Raises
    ------
    ProcessNotFoundError
        If there is no such process.
    """
    there = processes.process(pid)
    if there is None:
        raise ProcessNotFoundError(f"attach: no process {pid}; expected the id of a running process")
    watched = _board_of(pid)
    if watched is not None:
        return _watched(pid, watched[0], watched[1], seconds, native=native)
    unseen = [
        "steps, phases, autograd nodes and parameters: the process was not started by backlight",
        "collectives of the ranks: only their Python lines",
    ]
    if not processes.readable(pid):
        unseen.append("what its threads wait for in the kernel: tracing is denied")
    if there.dead or there.stopped:
        return _still(pid, there, unseen)
    samples: list[StackSample] = []
    before, begin = _ticks(pid), time.monotonic()
    for _ in range(LOOKS):
        sample, reason = stack_dumps.py_spy(pid)
        if sample is None:
            unseen.append(f"Python stacks: {reason}")
            time.sleep(seconds)
            break
        samples.append(sample)
        time.sleep(seconds / LOOKS)
    after, passed = _ticks(pid), time.monotonic() - begin
    extra: list[StackSample] = []
    if native and samples:
        sample, reason = stack_dumps.py_spy(pid, native=True)
        if sample is None:
            unseen.append(f"native stacks: {reason}")
        else:
            extra.append(sample)
    cpu = {tid: (after[tid] - before.get(tid, 0)) / processes.TICK / passed for tid in after}
    diagnosis = judge_outside(pid, tuple(samples), tuple(extra), cpu, processes.waits_for(pid, pid))
    threads = [_main(sample, pid) for sample in samples]
    # The whole stack: the user's line alone also stays the same throughout a long import.
    held = {thread.frames if thread is not None and thread.holds_gil else None for thread in threads}
    spins = len(samples) > 1 and len(held) == 1 and None not in held
    return Attached(
        pid, diagnosis, processes.kernel_stacks(pid), (*samples[-1:], *extra), tuple(unseen), spins=spins
    )


def judge_outside(
    pid: int,
    samples: tuple[StackSample, ...],
    native: tuple[StackSample, ...],
    cpu: dict[int, float],
    wait: str,
) -> Diagnosis:
    """Judge a process by its stacks and CPU times alone, which decides less than a board does."""
    threads = [t for sample in samples if (t := _main(sample, pid)) is not None]
    used = sum(cpu.values())
    own = cpu.get(pid, used)
    frames = [stacks.place(t) for t in threads]
    frame = frames[-1] if frames else None
    same = len(frames) >= 3 and all(f == frame for f in frames)
    phase = (stacks.phase_of(threads[-1]) if threads else None) or Phase.OTHER
    at = f" at {frame.place} in {frame.method}" if frame is not None else ""
    words = f"CPU {100 * used:.0f} %"
    known = Diagnosis(
        DiagnosisKind.UNKNOWN, phase, "", "a further look decides", "attach again, for longer", LOW,
        line=f"{frame.file}:{frame.line}" if frame is not None else None,
    )  # fmt: skip

    def say(verdict: DiagnosisKind, claim: str, confidence: str, refuted: str) -> Diagnosis:
        text = f"{verdict}: {claim}; {words}"
        return Diagnosis(verdict, phase, text, refuted, known.next_check, confidence, line=known.line)

    if not threads:
        return say(DiagnosisKind.UNKNOWN, "no stacks could be taken", LOW, known.refuted_if)
    if not same:
        return say(
            DiagnosisKind.UNKNOWN,
            f"its stack changes between looks, so it moves; in {phase} now{at}",
            MEDIUM,
            "no step has ended after a while",
        )
    if used <= 0.05:
        doing = "sleeps" if wait == "a sleep" else f"waits for {wait}" if wait else "waits"
        return say(
            DiagnosisKind.BLOCKED, f"in {phase}, the main thread {doing}{at}", HIGH, "it moves on by itself"
        )
    if own >= 0.6 and stacks.in_native_backward(threads[-1]):
        operation = next((op for sample in native if (op := native_operation(sample))), None)
        now = f", now in {operation}" if operation else ""
        return say(
            DiagnosisKind.UNKNOWN,
            f"backward computes in native code{now}; whether nodes finish is not seen from outside",
            LOW,
            known.refuted_if,
        )
    return say(
        DiagnosisKind.UNKNOWN,
        f"it computes{at} in every look; a loop without end and a long call look alike from outside",
        LOW,
        known.refuted_if,
    )


def _main(sample: StackSample, pid: int) -> ThreadStack | None:
    return next((t for t in sample.threads if t.tid == pid), sample.threads[0] if sample.threads else None)


def _still(pid: int, there: processes.Process, unseen: list[str]) -> Attached:
    verdict = DiagnosisKind.STOPPED if there.stopped else DiagnosisKind.DEAD
    said = (
        "is stopped by a signal or a debugger" if there.stopped else f"has {processes.cause(there.exit_code)}"
    )
    diagnosis = Diagnosis(
        verdict,
        Phase.OTHER,
        f"{verdict}: process {pid} {said}",
        refuted_if=f"/proc/{pid}/stat says otherwise",
        next_check=f"kill -CONT {pid} lets it go on" if there.stopped else "look at its parent",
        confidence=HIGH,
    )
    return Attached(pid, diagnosis, processes.kernel_stacks(pid), (), tuple(unseen))


def _board_of(pid: int) -> tuple[Path, int] | None:
    for place in runtime_dir.runtime_directories():
        for rank in runtime_dir.ranks_at(place):
            with contextlib.suppress(OSError):
                state = read_state(runtime_dir.state_path(place, rank))
                if state is not None and state.pid == pid:
                    return place, rank
    return None


def _watched(pid: int, place: Path, number: int, seconds: float, *, native: bool) -> Attached:
    """Judge a watched process as its sidecar does, with a patience of as long as we look."""
    limits = Thresholds()
    rank = RankObserver(place, number, limits)
    wish = place / f"look-{os.getpid()}"
    observations: list[Observation] = []
    try:
        wish.touch()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            rank.poll(closely=True)
            time.sleep(0.15)
        observations.append(rank.observation())
        diagnosis = diagnose(observations[0], limits, seconds)
        if diagnosis is not None and diagnosis.kind is DiagnosisKind.UNKNOWN and native:
            rank.look_native()
            observations.append(rank.observation())
            diagnosis = diagnose(observations[-1], limits, seconds) or diagnosis
    finally:
        wish.unlink(missing_ok=True)
        rank.leave()
    board = observations[-1].board
    if diagnosis is None:
        where = f"step {board.step}, {board.phase}" if board is not None else "no board"
        diagnosis = Diagnosis(
            DiagnosisKind.PASS,
            board.phase if board is not None else Phase.OTHER,
            f"PASS: it moves ({where})",
            refuted_if="the step does not end",
            next_check="attach again later",
            confidence=MEDIUM,
        )
    observation = observations[-1]
    return Attached(
        pid,
        diagnosis,
        processes.kernel_stacks(pid),
        (*observation.samples[-1:], *observation.native),
        observation.denied,
    )


def _ticks(pid: int) -> dict[int, int]:
    return {thread.tid: thread.ticks for thread in processes.threads(pid)}
