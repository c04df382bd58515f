"""Emission of a diagnosis: stored in the run the moment it is made, and logged on the terminal. No torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backlight.findings import phrases
from backlight.records import DiagnosisKind, Evidence, Finding, Made, Severity, Subject, to_json
from backlight.terminal import write
from backlight.watchdog.observation import Diagnosis, ExitReason, Observation, in_phase
from backlight.watchdog.shared_state import RankStatus, StateSnapshot

if TYPE_CHECKING:
    from backlight.store.write.watchdog import WatchdogWriter

RULE = "stall"
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
    title, detail = _title_and_detail(diagnosis)
    return Finding(
        rule=RULE,
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


def _title_and_detail(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the first clause and the others; where names are shortened, the detail is the whole claim."""
    first, _, others = diagnosis.claim.partition("; ")
    title = phrases.shorten(first)
    if title != first:
        return title, f"{diagnosis.claim}."
    return title, f"{others or f'{in_phase(diagnosis.phase)}, with {diagnosis.confidence} confidence'}."


def claim_of(finding: Finding) -> str:
    """Return the claim of the diagnosis of a finding."""
    kind, _, _ = finding.title.partition(" ")
    detail = finding.detail.removesuffix(".")
    return detail if detail.startswith(kind) else f"{finding.title}; {detail}"


def emit(
    writer: WatchdogWriter,
    diagnosis: Diagnosis,
    observations: Sequence[Observation],
    dumps: dict[int, str],
    *,
    step_offset: int = 0,
) -> Finding:
    """Store evidence (``dumps`` by rank), event and finding, log the diagnosis, and return the finding."""
    cause = next((o for o in observations if o.rank == diagnosis.rank), next(iter(observations), None))
    state = cause.state if cause is not None else None
    step = state.step + step_offset if state is not None else None
    paths = [writer.evidence(f"stall-rank-{rank:05d}.txt", text) for rank, text in sorted(dumps.items())]
    evidence = [Evidence(path, step=step) for path in paths if path]
    evidence.append(Evidence("events/stall", step=step, value=f"confidence {diagnosis.confidence}"))
    if cause is not None and cause.cpu is not None:
        evidence.append(Evidence("events/stall", step=step, value=round(cause.cpu, 3), unit="cores"))
    finding = as_finding(diagnosis, step, evidence)
    writer.event(
        state.step if state is not None else None,
        RULE,
        {
            "verdict": diagnosis.kind.value,
            "confidence": diagnosis.confidence,
            "rank": diagnosis.rank,
            "phase": diagnosis.phase.value,
            "claim": diagnosis.claim,
            "unobserved": max((o.state.world_size for o in observations if o.state is not None), default=0)
            - len(observations),
            "not_collected": {str(o.rank): list(o.not_collected) for o in observations if o.not_collected},
            "subject": to_json(finding.subject),
        },
    )
    writer.finding(finding)
    log(diagnosis.claim)
    for reason in dict.fromkeys(reason for o in observations for reason in o.not_collected):
        log(f"  could not be collected: {reason}")
    if evidence[0].path.endswith(".txt"):
        log(f"  evidence: {evidence[0].path}; next: {diagnosis.next_check}")
    if writer.lost:
        log(f"  could not be written into the run: {writer.lost}")
    return finding


def log(text: str) -> None:
    """Print a line on the terminal of the watched process, if it is still open."""
    with contextlib.suppress(OSError, ValueError):
        write(f"backlight: {text}", file=sys.stderr, flush=True)


@dataclass
class ReportedStall:
    """A rank as it was when its stall was reported; ``moved`` is the first other progress that was read."""

    began: float
    progress: int
    failed_backwards: int
    moved: int | None = None


def find_resolution(
    reported: ReportedStall, state: StateSnapshot, *, ended: str = "", exit_reason: ExitReason | None = None
) -> tuple[str, str] | None:
    """Return event and words for how a stall was resolved, None while that is open; update its ``moved``."""
    if state.status is RankStatus.FAILED:
        by = f" by {exit_reason.error.partition(':')[0]}" if exit_reason is not None else " by an exception"
        return ENDED, f"left its training{by}"
    if ended:
        return ENDED, f"{ended} without having moved again"
    if state.raised != reported.failed_backwards:
        return ENDED, "ended that backward by an exception"
    if state.status is RankStatus.FINISHED:
        return ENDED, "has ended its training"
    if state.progress == reported.progress:
        return None
    # The last heartbeat of an interrupted run looks like one that moves again: it takes two in a row.
    if reported.moved is None:
        reported.moved = state.progress
        return None
    return (RESUMED, "moves again") if state.progress != reported.moved else None
