"""Findings that were reported while a run went on, and that are no longer found. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backlight.records import Finding, FindingKind, Severity
from backlight.store.format.schema import REPORTED
from backlight.store.read.run import Run
from backlight.text import count, visible


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A finding as it was reported, at which step, and why it is withdrawn."""

    severity: Severity
    rule: str
    title: str
    step: int
    reason: str

    @property
    def text(self) -> str:
        """The whole as one sentence."""
        return (
            f"Withdrawn: {self.severity.value} of {visible(self.rule)}, reported at step {self.step:,}: "
            f"{visible(self.title)}. {visible(self.reason)}"
        )


def as_reported(finding: Finding) -> dict[str, Any]:
    """Return the payload of the event about a finding that is reported while the run goes on."""
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "title": finding.title,
        "names": sorted(name for _, name in subjects_of(finding) if name),
        "refuted_if": finding.refuted_if,
    }


def subjects_of(finding: Finding) -> set[tuple[str, str | None]]:
    """Return rule and name of all that a finding is about: it may name another of them first each time."""
    names = (evidence.path.rpartition("/")[2] for evidence in finding.evidence)
    about = finding.subject.parameter or finding.subject.module
    return {(finding.rule, about), *((finding.rule, name) for name in names)}


def withdrawn(run: Run, findings: Sequence[Finding]) -> list[Withdrawn]:
    """Return what the newest attempt reported as an error or a warning, and ``findings`` do not contain."""
    last = run.attempts[-1].index if run.attempts else 0
    events = [event for event in run.events(REPORTED) if event.attempt == last]
    return [
        Withdrawn(severity, str(event.payload["rule"]), str(event.payload["title"]), event.step or 0, reason)
        for event in events
        if (severity := Severity(event.payload["severity"])) is not Severity.INFO
        and (reason := _reason(event.payload, severity, findings, run.last_step() + 1))
    ]


def _reason(reported: Mapping[str, Any], severity: Severity, findings: Sequence[Finding], steps: int) -> str:
    """Return why a reported finding is withdrawn; empty where it holds."""
    alike = list(_alike(reported, findings))
    if not alike:
        return (
            f"Over all {count(steps, 'step')} the rule does not find it. It is refuted if "
            f"{str(reported['refuted_if']).rstrip('.')}."
        )
    worst = max((finding.severity for finding in alike), key=lambda found: found.rank)
    return "" if worst.rank >= severity.rank else f"Over all {count(steps, 'step')} it is: {worst.value}."


def _alike(reported: Mapping[str, Any], findings: Sequence[Finding]) -> Iterator[Finding]:
    names = set(reported["names"])
    for finding in findings:
        is_alike = finding.rule == reported["rule"] and (
            # A statistic names the worst parameter, which may be another one by now.
            not names
            or finding.kind is FindingKind.STATISTIC
            or bool(names & {name for _, name in subjects_of(finding)})
        )
        if is_alike or reported["rule"] in finding.merged:
            yield finding
