"""A verdict as a finding: in the run the moment it is made, and on the terminal. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from backlight.findings import wording
from backlight.monitors.stalls.model.observation import Diagnosis, Observation
from backlight.records import DiagnosisKind, Evidence, Finding, Made, Severity, Subject, to_json
from backlight.store.write.watchdog import WatchdogWriter

RULE = "stall"
VERSION = 1

_SEVERITY = {
    DiagnosisKind.SLOW: Severity.INFO,
    DiagnosisKind.LONG_OP: Severity.WARNING,
    DiagnosisKind.PHASE: Severity.WARNING,
    DiagnosisKind.UNKNOWN: Severity.WARNING,
}


def as_finding(diagnosis: Diagnosis, step: int | None, evidence: Sequence[Evidence]) -> Finding:
    """Return the finding that states a verdict; every other verdict than those on slowness is an error."""
    return Finding(
        rule=RULE,
        monitor="stalls",
        severity=_SEVERITY.get(diagnosis.kind, Severity.ERROR),
        title=wording.shorten(diagnosis.claim),
        detail=diagnosis.claim,
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


def file(
    writer: WatchdogWriter,
    diagnosis: Diagnosis,
    observations: Sequence[Observation],
    dumps: dict[int, str],
    *,
    offset: int = 0,
) -> Finding:
    """Store evidence, event and finding, and say the verdict on the terminal; return the finding.

    Parameters
    ----------
    writer:
        The watchdog's end of the run.
    judgement:
        The verdict.
    views:
        What was observed of each rank.
    dumps:
        Evidence as text, by rank.
    offset:
        Step offset of the attempt.
    """
    cause = next(
        (v for v in observations if v.rank == diagnosis.rank), observations[0] if observations else None
    )
    board = cause.board if cause is not None else None
    step = board.step + offset if board is not None else None
    evidence = []
    for rank, text in sorted(dumps.items()):
        path = writer.evidence(f"stall-rank-{rank:05d}.txt", text)
        if path:
            evidence.append(Evidence(path, step=step))
    evidence.append(Evidence("events/stall", step=step, value=f"confidence {diagnosis.confidence}"))
    if cause is not None and cause.cpu is not None:
        evidence.append(Evidence("events/stall", step=step, value=round(cause.cpu, 3), unit="cores"))
    finding = as_finding(diagnosis, step, evidence)
    writer.event(
        board.step if board is not None else None,
        RULE,
        {
            "verdict": diagnosis.kind.value,
            "confidence": diagnosis.confidence,
            "rank": diagnosis.rank,
            "phase": diagnosis.phase.value,
            "claim": diagnosis.claim,
            "not_collected": {str(v.rank): list(v.denied) for v in observations if v.denied},
            "subject": to_json(finding.subject),
        },
    )
    writer.finding(finding)
    say(diagnosis.claim)
    for reason in dict.fromkeys(reason for v in observations for reason in v.denied):
        say(f"  could not be collected: {reason}")
    if evidence[0].path.endswith(".txt"):
        say(f"  evidence: {evidence[0].path}; next: {diagnosis.next_check}")
    if writer.lost:
        say(f"  this could not be written into the run: {writer.lost}")
    return finding


def say(text: str) -> None:
    """Print a line on the terminal that the watched process writes to; a closed one is no reason to end."""
    try:
        sys.stderr.write(f"backlight: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return
