"""From what was seen of one case to a verdict that states its evidence; pure, so it can be redone.

The order: how the case ended; then a finding of the sidecar in its run directory; then progress, CPU time
and stacks of the window before the limit. Time alone says no more than that the case did not finish.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from dataclasses import dataclass

from backlight.diagnose.matrix import stacks
from backlight.diagnose.matrix.observations import Ended, Observation, Place, ProcessSeen, Stack, StallSeen
from backlight.diagnose.matrix.plan_errors import near
from backlight.records import DiagnosisKind

IDLE = 0.05
"""Cores per process below which it does nothing; launchers that poll stay under it."""

BUSY = 0.8
"""Cores above which a thread works without a pause; time waiting for a processor counts."""

WAITING = 0.2
"""Cores above which a thread works without a pause; waiting for a processor counts."""

SHORTEST = 1.0
"""Seconds of window below which nothing is judged by CPU time, which the kernel counts in 0.01 s."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is said of a case: a verdict, in a sentence, what it rests on, and what would refute it.

    ``line`` is ``file:line`` of the user's code where one is known. ``alternatives`` are explanations
    that the evidence leaves open.
    """

    verdict: DiagnosisKind
    claim: str
    confidence: str
    because: tuple[str, ...]
    refuted_if: str
    line: str = ""
    phase: str = ""
    alternatives: tuple[str, ...] = ()


def read_verdicts(text: str) -> tuple[DiagnosisKind, ...]:
    """Read verdicts that are separated by commas.

    Raises
    ------
    ValueError
        If one is unknown.
    """
    words = [word.strip().upper() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in set(DiagnosisKind):
            raise ValueError(f"no verdict is called {word!r}{near(word, [v.value for v in DiagnosisKind])}")
    return tuple(DiagnosisKind(word) for word in words)


def judge(seen: Observation) -> Judgement:
    """Return the verdict on one case."""
    if seen.ended is Ended.NOT_STARTED:
        return Judgement(
            DiagnosisKind.UNKNOWN,
            f"could not be started: {seen.reason}",
            "none",
            (),
            "it starts when run again",
        )
    if seen.ended is Ended.EXITED:
        return _exited(seen)
    if seen.window is not None:
        for decide in (_moving, _told, _stopped, _idle, _busy):
            said = decide(seen)
            if said is not None:
                return said
    return _undecided(seen)


def _exited(seen: Observation) -> Judgement:
    code = seen.exit_code or 0
    if code:
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        error = f": {seen.error}" if seen.error else ""
        stall = _last_stall(seen)
        because = [f"exit code {code}", *([seen.error] if seen.error else [])]
        because += [f"stall finding before: {stall.verdict}: {stall.claim}"] if stall else []
        alternatives = ("another process killed it (out of memory, a batch system)",) if code == -9 else ()
        return Judgement(
            DiagnosisKind.CRASH, f"{how} after {seen.seconds:.1f} s{error}", "high", tuple(because),
            "the same command run again exits with 0", seen.error_line, alternatives=alternatives,
        )  # fmt: skip
    if seen.success is False:
        return Judgement(
            DiagnosisKind.UNKNOWN,
            f"exited with 0 after {seen.seconds:.1f} s, but its output lacks what the plan calls success",
            "none",
            ("exit code 0", "the pattern of success does not match"),
            "the pattern of success stands in the output of another attempt",
            alternatives=("it ended early without an error", "the pattern is wrong"),
        )
    proof = ["exit code 0"] if seen.success is None else ["exit code 0", "the pattern of success matches"]
    proof += [f"meanwhile the run had a stall finding: {stall.claim}" for stall in seen.stalls]
    return Judgement(
        DiagnosisKind.PASS,
        f"finished in {seen.seconds:.1f} s",
        "high",
        tuple(proof),
        "it does not finish when run again",
    )


def _moving(seen: Observation) -> Judgement | None:
    window = seen.window
    if window is None:
        return None
    for progress in window.progress:
        # A case that moved in the first half only may hang since.
        if not progress.before < progress.middle < progress.after:
            continue
        rate = (progress.after - progress.before) / window.seconds
        eta = (
            f", ETA {(progress.total - progress.after) / rate:.0f} s"
            if progress.total > progress.after
            else ""
        )
        total = f" of {progress.total}" if progress.total else ""
        return Judgement(
            DiagnosisKind.SLOW,
            f"slow, not hung: {progress.after}{total} ({progress.by}), {rate:.3g}/s over the last "
            f"{window.seconds:.1f} s{eta}",
            "high",
            (f"{progress.by}: {progress.before}, {progress.middle}, {progress.after}",),
            "the count stands still in a longer window",
        )
    return None


def _told(seen: Observation) -> Judgement | None:
    stall = _last_stall(seen)
    if stall is None:
        return None
    try:
        verdict = DiagnosisKind(stall.verdict)
    except ValueError:
        return None
    return Judgement(
        verdict, stall.claim, "as the finding says", (f"finding of rule stall in {stall.path}", *_cpu(seen)),
        stall.refuted_if, stall.line or _line(_held(seen)), stall.phase,
    )  # fmt: skip


def _stopped(seen: Observation) -> Judgement | None:
    stopped = [p for p in seen.processes if p.state == "T"]
    if not stopped:
        return None
    who = ", ".join(str(p.pid) for p in stopped)
    return Judgement(
        DiagnosisKind.STOPPED, f"process {who} is stopped by a signal (state T)", "high",
        (f"state T of {who}",), "the process table shows another state",
        alternatives=("a debugger or job control stopped it",),
    )  # fmt: skip


def _idle(seen: Observation) -> Judgement | None:
    window = seen.window
    if window is None or window.seconds < SHORTEST or not seen.processes:
        return None
    if (
        any(p.cpu >= IDLE or p.delay >= WAITING for p in seen.processes)
        or window.output_bytes > 0
        or _came_on(seen)
    ):
        return None
    held = _held(seen)
    if held is None:
        return None
    stack, place = held
    where = _where(stack, place)
    waits = _native_wait(seen, stack)
    return Judgement(
        DiagnosisKind.BLOCKED,
        f"blocked: thread {stack.thread} waits in {where}{waits}; CPU {100 * window.cpu:.0f} % over "
        f"{window.seconds / 2:.1f} s",
        "high" if window.progress else "medium",
        (
            *_cpu(seen),
            f"{_dumps(seen, stack)} dumps show the same line ({stack.source})",
            "nothing was printed and nothing moved" if window.progress else "nothing was printed",
        ),
        "a later dump shows another line, or the process uses CPU time again",
        _line(held),
        alternatives=() if window.progress else ("it waits for something that would have come later",),
    )


def _busy(seen: Observation) -> Judgement | None:
    window = seen.window
    if window is None or window.seconds < SHORTEST or _came_on(seen):
        return None
    for stack, place in _all_held(seen):
        process = next((p for p in seen.processes if p.pid == stack.pid), None)
        if process is None or process.cpu + process.delay < BUSY or process.cpu < IDLE:
            continue
        same = [s for s in _dumps_of(seen, stack) if s.source == "py-spy"]
        native = {stacks.native_top(s) for s in same if s.frames and any(f.native for f in s.frames)}
        holding = bool(same) and all(s.holds_lock for s in same)
        operation = next(iter(native), "") if len(native) == 1 else ""
        # A training at work shows one line, too: without a count that stands still, only a thread
        # that holds the interpreter lock on one line in every dump is more than work.
        if holding and not operation:
            return _spin(seen, process, stack, place)
        if operation and window.progress:
            return Judgement(
                DiagnosisKind.LONG_OP,
                f"inside the native operation {operation}, called at {_where(stack, place)}", "medium",
                (*_cpu(seen), f"{len(same)} dumps show the same line", f"native frame {operation}"),
                "a later dump shows another operation, or progress moves", _line((stack, place)),
                alternatives=("the operation is slow and will end",),
            )  # fmt: skip
    return None


def _spin(seen: Observation, process: ProcessSeen, stack: Stack, place: Place) -> Judgement:
    return Judgement(
        DiagnosisKind.SPIN,
        f"spins in {_where(stack, place)}: CPU {100 * process.cpu:.0f} %, the same line in every dump",
        "high" if seen.window is not None and seen.window.progress else "medium",
        (*_cpu(seen), f"{_dumps(seen, stack)} dumps show the same line, holding the interpreter lock"),
        "a later dump shows another line, or progress moves",
        _line((stack, place)),
        alternatives=("a single long call from that line",),
    )


def _undecided(seen: Observation) -> Judgement:
    because = [f"{seen.seconds:.1f} s passed, the limit was {seen.limit:g} s", *_cpu(seen)]
    alternatives = ("it is slow and would finish", "it hangs")
    if seen.stacks and seen.window is not None and seen.window.seconds >= SHORTEST:
        held = _held(seen)
        where = f"; the dumps agree on {_where(*held)}" if held else "; the dumps show different lines"
        return Judgement(
            DiagnosisKind.UNKNOWN, f"did not finish in {seen.limit:g} s{where}, which decides nothing",
            "none", tuple(because), "does not apply", _line(held),
            alternatives=(*alternatives, "say how progress shows: progress = 'regular expression' in [base]"),
        )  # fmt: skip
    return Judgement(
        DiagnosisKind.DID_NOT_FINISH, f"did not finish in {seen.limit:g} seconds", "none", tuple(because),
        "it finishes with a longer limit", alternatives=alternatives,
    )  # fmt: skip


def _came_on(seen: Observation) -> bool:
    """Tell whether anything counted moved in the second half of the window."""
    return seen.window is not None and any(p.after > p.middle for p in seen.window.progress)


def _last_stall(seen: Observation) -> StallSeen | None:
    return seen.stalls[-1] if seen.stalls and not seen.stalls[-1].over else None


def _by_dump(seen: Observation) -> dict[tuple[int, str], list[Stack]]:
    """Return the thread at work in each dump, by process and source."""
    dumps: dict[tuple[int, str, int], list[Stack]] = defaultdict(list)
    for stack in seen.stacks:
        dumps[stack.pid, stack.source, stack.sample].append(stack)
    found: dict[tuple[int, str], list[Stack]] = defaultdict(list)
    for (pid, source, _), group in dumps.items():
        working = stacks.at_work(group)
        if working is not None:
            found[pid, source].append(working)
    return found


def _all_held(seen: Observation) -> list[tuple[Stack, Place]]:
    """Return for each process the stack and place that two or more of its dumps agree on."""
    held = {}
    parents = {p.parent for p in seen.processes}
    for (pid, source), found in sorted(_by_dump(seen).items(), key=lambda item: item[0][1] != "py-spy"):
        if len(found) < 2 or any(_signature(s) != _signature(found[0]) for s in found):
            continue
        place = stacks.users_place(found[0]) or stacks.innermost(found[0])
        if place is not None and pid not in held:
            # The last dump is the one with native frames.
            held[pid] = (next(s for s in reversed(found) if s.source == source), place)
    # What the user's code does in a process without children explains more than a launcher that waits.
    return sorted(held.values(), key=lambda h: (not stacks.is_users(h[1]), h[0].pid in parents, h[0].pid))


def _signature(stack: Stack) -> tuple[tuple[str, int], ...]:
    return tuple((place.file, place.line) for place in stack.frames if not place.native)


def _held(seen: Observation) -> tuple[Stack, Place] | None:
    held = _all_held(seen)
    return held[0] if held else None


def _dumps_of(seen: Observation, stack: Stack) -> list[Stack]:
    return _by_dump(seen).get((stack.pid, stack.source), [])


def _dumps(seen: Observation, stack: Stack) -> int:
    return len(_dumps_of(seen, stack))


def _where(stack: Stack, place: Place) -> str:
    inner = stacks.innermost(stack)
    deeper = (
        f" (through {inner.function}, {stacks.short(inner)})" if inner is not None and inner != place else ""
    )
    return f"{place.function}, {stacks.short(place)}{deeper}"


def _native_wait(seen: Observation, stack: Stack) -> str:
    """Say what the thread waits for, as far as native frames tell."""
    names = [f.function for s in _dumps_of(seen, stack) for f in s.frames if f.native]
    return next((f" for {what}" for part, what in _WAITS if any(part in name for name in names)), "")


_WAITS = (
    ("acquire_lock", "a lock"),
    ("nanosleep", "the end of a sleep"),
    ("waitpid", "a child"),
    ("wait4", "a child"),
    ("recv", "input"),
    ("select", "input"),
    ("poll", "input"),
)


def _line(held: tuple[Stack, Place] | None) -> str:
    return f"{held[1].file}:{held[1].line}" if held is not None else ""


def _cpu(seen: Observation) -> tuple[str, ...]:
    if seen.window is None:
        return ()
    each = ", ".join(f"{p.pid}: {100 * p.cpu:.0f} %" for p in seen.processes)
    return (f"CPU over the last {seen.window.seconds / 2:.1f} s: {each or 'no process'}",)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
