"""Stored diagnoses of stalls, joined into one where several machines took part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from backlight import codec
from backlight.records import Evidence, Finding
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.watchdog.peers import EVENT, joint_stalls
from backlight.watchdog.reports import RULE
from backlight.watchdog.timeouts import StallLimits


@rule(RULE, monitor="stalls", version=2, limits=StallLimits, restates=True, logged=True)
def stall(run: Run, limits: StallLimits) -> Iterator[Finding]:
    """Report each stored diagnosis once; those that one machine left open are replaced by the joint one."""
    joint = [stall.finding for stall in joint_stalls(run.events(EVENT))]
    open_subjects = [event.payload.get("subject") for event in run.events(RULE) if event.payload.get("open")]
    replaced = {(finding.subject.verdict, finding.subject.rank) for finding in joint}
    reported: set[object] = set()
    files: dict[str, Evidence] = {}
    for finding in run.stored_findings():
        subject = finding.subject
        # At one line it is one stall, however long it lasts by the second diagnosis.
        key = subject if subject.line else (finding.title, finding.detail, subject.step)
        if finding.rule != RULE or key in reported:
            continue
        reported.add(key)
        is_replaced = (subject.verdict, subject.rank) in replaced
        if joint and (codec.plain(subject) in open_subjects or is_replaced):
            files.update({e.path: e for e in finding.evidence if e.path in run.evidence()})
            continue
        yield finding
    for finding in joint:
        yield dataclasses.replace(finding, evidence=(*files.values(), *finding.evidence))
