"""The verdict on one case, from what was observed of it alone."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import PurePath

from backlight.diagnose.matrix.observation import Observation, ProcessSample
from backlight.records import DiagnosisKind
from backlight.text import did_you_mean

IDLE_CORES = 0.05
"""Cores below which a process does nothing; launchers that poll stay below it."""

BUSY_CORES = 0.8
"""Cores above which a process computes without a pause; time in the queue for a core counts."""

QUEUED_CORES = 0.2
"""Cores queued for, above which a process is starved rather than idle."""

MIN_WINDOW_S = 1.0
"""Window below which CPU time, which the kernel counts in 0.01 s, decides nothing."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A verdict, what it rests on, what would refute it, and what else the evidence allows.

    ``line`` is ``file:line`` of the user's code where it is known.
    """

    verdict: DiagnosisKind
    claim: str
    confidence: str = "high"
    because: tuple[str, ...] = ()
    refuted_if: str = ""
    line: str = ""
    alternatives: tuple[str, ...] = ()


def read_verdicts(text: str) -> tuple[DiagnosisKind, ...]:
    """Return the verdicts in a list separated by commas; a ValueError names an unknown one."""
    words = [word.strip().upper() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in set(DiagnosisKind):
            raise ValueError(f"no verdict is called {word!r}{did_you_mean(word, map(str, DiagnosisKind))}")
    return tuple(DiagnosisKind(word) for word in words)


def evaluate(observed: Observation) -> Evaluation:
    """Return the verdict on one case; time alone supports none."""
    if observed.problem:
        return Evaluation(DiagnosisKind.UNKNOWN, f"could not be started: {observed.problem}", "none")
    if observed.exit_code is not None:
        return _exited(observed, observed.exit_code)
    rules = (_moving, _stall, _stopped, _blocked, _busy) if observed.window_s else ()
    return next((found for rule in rules if (found := rule(observed)) is not None), _undecided(observed))


def _exited(observed: Observation, code: int) -> Evaluation:
    after = f"after {observed.seconds:.1f} s"
    stalls = tuple(f"stall finding: {stall.detail}" for stall in observed.stalls)
    if code:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was ended by {name}" if code < 0 else f"left with exit code {code}"
        return Evaluation(
            DiagnosisKind.CRASH, f"{how} {after}{': ' if observed.error else ''}{observed.error}",
            because=(f"exit code {code}", *stalls),
            refuted_if="the same command exits with 0 when run again", line=observed.error_line,
            alternatives=("another process killed it (out of memory, a batch system)",) if code == -9 else (),
        )  # fmt: skip
    if observed.success is False:
        return Evaluation(
            DiagnosisKind.UNKNOWN, f"exited with 0 {after}, but the pattern of success is not in its output",
            "none", ("exit code 0",), "another attempt prints what the pattern of success matches",
            alternatives=("it ended early without an error", "the pattern is wrong"),
        )  # fmt: skip
    proof = ("exit code 0", "the pattern of success matches") if observed.success else ("exit code 0",)
    return Evaluation(
        DiagnosisKind.PASS, f"finished in {observed.seconds:.1f} s", because=proof + stalls,
        refuted_if="it does not finish when run again",
    )  # fmt: skip


def _moving(observed: Observation) -> Evaluation | None:
    for p in observed.progress:
        # A case that moved in the first half only may be hung since.
        if p.before < p.middle < p.after:
            rate = (p.after - p.before) / observed.window_s
            eta = f", ETA {(p.total - p.after) / rate:.0f} s" if p.total > p.after else ""
            total = f" of {p.total}" if p.total else ""
            claim = f"slow, not hung: {p.after}{total} ({p.source}), {rate:.3g}/s over the last "
            return Evaluation(
                DiagnosisKind.SLOW, f"{claim}{observed.window_s:.1f} s{eta}",
                because=(f"{p.source}: {p.before}, {p.middle}, {p.after}",),
                refuted_if="the count does not change over a longer window",
            )  # fmt: skip
    return None


def _stall(observed: Observation) -> Evaluation | None:
    stall = observed.stalls[-1] if observed.stalls and not observed.resumed else None
    if stall is None or stall.subject.verdict not in set(DiagnosisKind):
        return None
    line = stall.subject.line or next((sample.line for sample in _ranked(observed) if sample.line), "")
    because = ("finding of rule stall in the run directory", *_cpu(observed))
    verdict = DiagnosisKind(stall.subject.verdict)
    return Evaluation(verdict, stall.detail, "as the finding", because, stall.refuted_if, line)


def _stopped(observed: Observation) -> Evaluation | None:
    stopped = [sample for sample in observed.processes if sample.verdict is DiagnosisKind.STOPPED]
    return _from_sample(observed, stopped[0], DiagnosisKind.STOPPED, "high") if stopped else None


def _blocked(observed: Observation) -> Evaluation | None:
    idle = all(s.cpu < IDLE_CORES and s.delay < QUEUED_CORES for s in observed.processes)
    blocked = [s for s in _ranked(observed) if s.verdict is DiagnosisKind.BLOCKED]
    if not idle or not blocked or _may_have_moved(observed) or observed.output_bytes:
        return None
    if observed.progress:
        return _from_sample(observed, blocked[0], DiagnosisKind.BLOCKED, "high")
    why = "it waits for something that would have come later"
    return _from_sample(observed, blocked[0], DiagnosisKind.BLOCKED, "medium", why)


def _busy(observed: Observation) -> Evaluation | None:
    for sample in () if _may_have_moved(observed) else _ranked(observed):
        if sample.cpu + sample.delay < BUSY_CORES or sample.cpu < IDLE_CORES:
            continue
        # A run at work shows one line, too: without a known count, only the lock held on one line decides.
        if sample.spins or sample.verdict is DiagnosisKind.SPIN:
            confidence, why = "high" if observed.progress else "medium", "a single long call from that line"
            return _from_sample(observed, sample, DiagnosisKind.SPIN, confidence, why)
        if observed.progress and sample.verdict is DiagnosisKind.LONG_OP:
            why = "the operation is slow and will end"
            return _from_sample(observed, sample, DiagnosisKind.LONG_OP, "medium", why)
    return None


def _from_sample(
    observed: Observation, sample: ProcessSample, verdict: DiagnosisKind, confidence: str, *why: str
) -> Evaluation:
    claim = sample.claim
    if verdict is DiagnosisKind.SPIN:
        claim = f"it computes on one line, {PurePath(sample.line).name}; {claim}"
    return Evaluation(
        verdict, f"{verdict.value}: {claim}", confidence,
        (*_cpu(observed), f"every sample of process {sample.pid} shows the same line"),
        "a later sample shows another line, or progress moves", sample.line, why,
    )  # fmt: skip


def _undecided(observed: Observation) -> Evaluation:
    because = (f"{observed.seconds:.1f} s passed, the limit was {observed.limit:g} s", *_cpu(observed))
    alternatives = ("it is slow and would finish", "it hangs")
    sampled = any(sample.claim for sample in observed.processes)
    if not sampled or observed.window_s < MIN_WINDOW_S:
        return Evaluation(
            DiagnosisKind.DID_NOT_FINISH, f"did not finish in {observed.limit:g} seconds", "none", because,
            "it finishes with a longer limit", alternatives=alternatives,
        )  # fmt: skip
    first = _ranked(observed)[0]
    return Evaluation(
        DiagnosisKind.UNKNOWN, f"did not finish in {observed.limit:g} s; {first.claim}",
        "none", because, "does not apply", first.line,
        (*alternatives, "set progress = 'regular expression' in [base] to decide"),
    )  # fmt: skip


def _may_have_moved(observed: Observation) -> bool:
    """Return whether a count moved in the second half of the window, or the window is too short to tell."""
    return observed.window_s < MIN_WINDOW_S or any(p.after > p.middle for p in observed.progress)


def _ranked(observed: Observation) -> list[ProcessSample]:
    # A process without children explains more than the launcher that waits for it.
    return sorted(observed.processes, key=lambda sample: (not sample.line, not sample.leaf, sample.pid))


def _cpu(observed: Observation) -> tuple[str, ...]:
    each = ", ".join(f"{p.pid}: {100 * p.cpu:.0f} %" for p in observed.processes) or "no process"
    return (f"CPU over the last {observed.window_s / 2:.1f} s: {each}",) if observed.window_s else ()
