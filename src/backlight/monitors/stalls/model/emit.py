"""A verdict as a finding: in the run the moment it is made, and on the terminal. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from backlight.monitors.stalls.model.observation import Judgement, View
from backlight.records import Evidence, Finding, Made, Severity, Subject, Verdict, to_json
from backlight.store.write.watchdog import WatchdogWriter

RULE = "stall"
VERSION = 1

_SEVERITY = {
    Verdict.SLOW: Severity.INFO,
    Verdict.LONG_OP: Severity.WARNING,
    Verdict.PHASE: Severity.WARNING,
    Verdict.UNKNOWN: Severity.WARNING,
}


def as_finding(judgement: Judgement, step: int | None, evidence: Sequence[Evidence]) -> Finding:
    """Return the finding that states a verdict; every other verdict than those on slowness is an error."""
    return Finding(
        rule=RULE,
        severity=_SEVERITY.get(judgement.verdict, Severity.ERROR),
        claim=judgement.claim,
        subject=Subject(
            parameter=judgement.parameter,
            module=judgement.module,
            step=step,
            rank=judgement.rank,
            line=judgement.line,
            verdict=judgement.verdict.value,
            phase=judgement.phase.value,
        ),
        evidence=tuple(evidence),
        next_check=judgement.next_check,
        refuted_if=judgement.refuted_if,
        version=VERSION,
        made=Made.LIVE,
    )


def file(
    writer: WatchdogWriter,
    judgement: Judgement,
    views: Sequence[View],
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
    cause = next((v for v in views if v.rank == judgement.rank), views[0] if views else None)
    board = cause.board if cause is not None else None
    step = board.step + offset if board is not None else None
    evidence = []
    for rank, text in sorted(dumps.items()):
        path = writer.evidence(f"stall-rank-{rank:05d}.txt", text)
        if path:
            evidence.append(Evidence(path, step=step))
    evidence.append(Evidence("events/stall", step=step, value=f"confidence {judgement.confidence}"))
    if cause is not None and cause.cpu is not None:
        evidence.append(Evidence("events/stall", step=step, value=round(cause.cpu, 3), unit="cores"))
    finding = as_finding(judgement, step, evidence)
    writer.event(
        board.step if board is not None else None,
        RULE,
        {
            "verdict": judgement.verdict.value,
            "confidence": judgement.confidence,
            "rank": judgement.rank,
            "phase": judgement.phase.value,
            "claim": judgement.claim,
            "not_collected": {str(v.rank): list(v.denied) for v in views if v.denied},
            "subject": to_json(finding.subject),
        },
    )
    writer.finding(finding)
    say(judgement.claim)
    for reason in dict.fromkeys(reason for v in views for reason in v.denied):
        say(f"  could not be collected: {reason}")
    if evidence[0].path.endswith(".txt"):
        say(f"  evidence: {evidence[0].path}; next: {judgement.next_check}")
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
