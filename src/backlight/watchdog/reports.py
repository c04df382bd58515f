"""Reports of the watchdog: which decision is news, the finding it becomes, and how a stall ends. No torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backlight import clock, codec
from backlight.processes import ProcessEnd
from backlight.records import DiagnosisKind, Evidence, Finding, Made, Severity, Subject
from backlight.store.format.schema import STALL
from backlight.terminal import write
from backlight.watchdog import stacks
from backlight.watchdog.diagnosis import Cause, Decision
from backlight.watchdog.observation import ExitReason, Observation
from backlight.watchdog.observer import RankObserver
from backlight.watchdog.shared_state import RankStatus, StateSnapshot
from backlight.watchdog.text import Diagnosis, describe, title_and_detail
from backlight.watchdog.words import end_text

if TYPE_CHECKING:
    from backlight.store.write.watchdog import WatchdogWriter

VERSION = 1

RESUMED, ENDED = "stall_over", "stall_ended"
"""Events of a rank that moves again after a stall, and of one that ended without."""

_SEVERITY = {
    DiagnosisKind.SLOW: Severity.INFO,
    DiagnosisKind.LONG_OP: Severity.WARNING,
    DiagnosisKind.PHASE: Severity.WARNING,
    DiagnosisKind.UNKNOWN: Severity.WARNING,
}


def as_finding(diagnosis: Diagnosis, step: int | None, evidence: Sequence[Evidence]) -> Finding:
    """Return a diagnosis as a finding: an error, unless the rank is slow or the diagnosis uncertain."""
    title, detail = title_and_detail(diagnosis)
    return Finding(
        rule=STALL,
        monitor="stalls",
        severity=_SEVERITY.get(diagnosis.kind, Severity.ERROR),
        title=title,
        detail=detail,
        subject=Subject(
            parameter=diagnosis.parameter,
            module=diagnosis.module,
            step=step,
            rank=diagnosis.rank,
            line=diagnosis.line,
            verdict=diagnosis.kind.value,
            phase=diagnosis.phase.value,
        ),
        evidence=tuple(evidence),
        fix=diagnosis.next_check,
        refuted_if=diagnosis.refuted_if,
        version=VERSION,
        made=Made.LIVE,
    )


def emit(
    writer: WatchdogWriter,
    decision: Decision,
    observations: Sequence[Observation],
    shown: Sequence[Observation],
    *,
    step_offset: int = 0,
) -> None:
    """Store evidence of the ranks ``shown``, event and finding, and log the diagnosis."""
    diagnosis = describe(decision)
    blamed = next((o for o in observations if o.rank == diagnosis.rank), next(iter(observations), None))
    state = blamed.state if blamed is not None else None
    step = state.step + step_offset if state is not None else None
    texts = {o.rank: format_evidence(o) for o in shown}
    paths = [writer.evidence(f"stall-rank-{rank:05d}.txt", text) for rank, text in sorted(texts.items())]
    evidence = [Evidence(path, step=step) for path in paths if path]
    files = len(evidence)
    evidence.append(Evidence("events/stall", step=step, value=f"confidence {diagnosis.confidence}"))
    if blamed is not None and blamed.cpu is not None:
        evidence.append(Evidence("events/stall", step=step, value=round(blamed.cpu, 3), unit="cores"))
    finding = as_finding(diagnosis, step, evidence)
    world_size = max((o.state.world_size for o in observations if o.state is not None), default=0)
    writer.event(
        state.step if state is not None else None,
        STALL,
        {
            "verdict": diagnosis.kind.value,
            "confidence": diagnosis.confidence,
            "rank": diagnosis.rank,
            "phase": diagnosis.phase.value,
            "claim": diagnosis.claim,
            "unobserved": world_size - len(observations),
            "open": decision.unobserved is not None,
            "not_collected": {str(o.rank): list(o.not_collected) for o in observations if o.not_collected},
            "subject": codec.plain(finding.subject),
        },
    )
    writer.finding(finding)
    log(diagnosis.claim)
    for reason in dict.fromkeys(reason for o in observations for reason in o.not_collected):
        log(f"  could not be collected: {reason}")
    if files:
        log(f"  evidence: {evidence[0].path}; next: {diagnosis.next_check}")
    if writer.lost:
        log(f"  could not be written into the run: {writer.lost}")


def log(text: str) -> None:
    """Print a line on the terminal of the watched process, if it is still open."""
    with contextlib.suppress(OSError, ValueError):
        write(f"backlight: {text}", file=sys.stderr, flush=True)


def format_evidence(obs: Observation) -> str:
    """Return an observation as text, the form in which it is kept."""
    parts = []
    state = obs.state
    if state is not None:
        shown = {k: v for k, v in vars(state).items() if k not in {"collectives", "arrived"}}
        shown["typical"] = {p.value: f"{s:.3f} s" for p, s in state.typical.items() if s}
        parts.append("shared state\n" + "\n".join(f"  {name} = {value}" for name, value in shown.items()))
        for call in state.collectives:
            duration = "inside" if call.inside else f"{(call.left - call.entered) / 1e6:.1f} ms"
            parts.append(f"  collective {call.call} #{call.number}: {duration}")
        if obs.end is None:
            parts.append("threads, from /proc\n" + stacks.format_threads(state.pid))
    samples = [*obs.samples[-3:], *obs.native_samples]
    parts += [f"stack sample {n}, {stacks.format_sample(sample)}" for n, sample in enumerate(samples)]
    for worker in obs.workers.stacks if obs.workers is not None else ():
        lines = [f'  File "{f.file}", line {f.line} in {f.function}' for f in worker.frames]
        parts.append("\n".join((f"worker {worker.pid} of the data loader (most recent call first)", *lines)))
    if obs.not_collected:
        parts.append("could not be collected\n" + "\n".join(f"  {reason}" for reason in obs.not_collected))
    return "\n".join(parts)


# How a stall ends


@dataclass
class StallStart:
    """A rank as it was when its stall was reported; ``moved`` is the first other progress that was read."""

    began: float
    progress: int
    failed_backwards: int
    moved: int | None = None


def find_resolution(
    start: StallStart,
    state: StateSnapshot,
    *,
    end: ProcessEnd | None = None,
    exit_reason: ExitReason | None = None,
) -> tuple[str, str] | None:
    """Return event and words for how a stall was resolved, None while that is open; update its ``moved``."""
    if state.status is RankStatus.FAILED:
        return (
            ENDED,
            f"left its training by {exit_reason.kind if exit_reason is not None else 'an exception'}",
        )
    if end is not None:
        return ENDED, f"{end_text(end)} without having moved again"
    if state.raised != start.failed_backwards:
        return ENDED, "ended that backward by an exception"
    if state.status is RankStatus.FINISHED:
        return ENDED, "has ended its training"
    if state.progress == start.progress:
        return None
    # The last heartbeat of an interrupted run looks like one that moves again: it takes two in a row.
    if start.moved is None:
        start.moved = state.progress
        return None
    return (RESUMED, "moves again") if state.progress != start.moved else None


# What is news


@dataclass
class RankReports:
    """Reports of one rank so far."""

    progress: int | None = None  # at its last report
    phase_since: int | None = None
    retry_at: float | None = None  # when an inconclusive report is repeated
    stall: StallStart | None = None
    is_dead: bool = False
    is_death_reported: bool = False
    slow_since: int | None = None  # begin of the last phase that was reported as slow


class ReportLog:
    """Reports of all ranks so far, so that each stall is reported once."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankReports] = {}
        self.mismatch: Cause | None = None  # that was reported
        self._last: tuple[Decision, list[int]] | None = None

    def is_news(
        self,
        decision: Decision,
        due: Sequence[RankObserver],
        ranks: Sequence[RankObserver],
        observations: Sequence[Observation],
    ) -> bool:
        """Return whether a decision on ranks that are due is to be reported, and remember it."""
        cause = decision.cause
        is_slow = cause.kind is DiagnosisKind.SLOW
        is_inconclusive = is_slow or cause.kind is DiagnosisKind.UNKNOWN
        is_repeated = any(self.ranks[r.rank].retry_at is not None for r in due)
        for observer in ranks:
            if observer in due or observer.overdue_s is not None:
                is_moving = is_slow and observer.rank == cause.rank
                self._remember(
                    observer, is_slow=is_slow, is_moving=is_moving, is_inconclusive=is_inconclusive
                )
        if is_repeated and (is_inconclusive or decision.unobserved is not None):
            return False  # reported before, and nothing new is known here
        blamed = next((r for r in ranks if r.rank == cause.rank), None)
        if is_slow and blamed is not None and blamed.state is not None:
            reports, since = self.ranks[blamed.rank], blamed.state.phase_since
            if reports.slow_since == since:
                return False  # a pause on an overloaded machine does not make it new
            reports.slow_since = since
        if self.is_reported(decision):
            return False  # when the call was made, before anything hung
        if blamed is not None and cause.kind is DiagnosisKind.DEAD:
            # How those that waited for it end is no news of its own.
            reports = self.ranks[blamed.rank]
            was_reported, reports.is_death_reported = reports.is_death_reported, True
            if was_reported:
                return False
        last = self._last
        self._last = decision, [o.state.progress for o in observations if o.state is not None]
        return self._last != last  # else the timeout of another rank has passed, and none has moved since

    def is_reported(self, decision: Decision) -> bool:
        """Return whether a decision is on calls that do not fit together and were reported; remember them."""
        cause, before = decision.cause, self.mismatch
        if before is None and cause.kind is DiagnosisKind.MISMATCH:
            self.mismatch = cause
        return before is not None and (cause.what, cause.match) == (before.what, before.match)

    def _remember(
        self, observer: RankObserver, *, is_slow: bool, is_moving: bool, is_inconclusive: bool
    ) -> None:
        now, state, reports = clock.monotonic(), observer.state, self.ranks[observer.rank]
        if state is None or observer.is_done:
            return
        if is_slow or not is_inconclusive:
            # What moves again in this phase is not slow for that; where nothing was known, it is.
            reports.phase_since = state.phase_since
        if is_moving:
            return
        reports.progress = state.progress
        reports.retry_at = now + 2 * max(state.silence_s, 1.0) if is_inconclusive else None
        if not is_slow:  # otherwise it waits for one that moves
            reports.stall = StallStart(now, state.progress, state.raised)
