"""Stored diagnoses of stalls, joined into one where several machines took part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from backlight import codec
from backlight.records import Evidence, Finding
from backlight.registry import rule
from backlight.store.format.schema import STALL, STALL_VIEWS
from backlight.store.read.run import Run
from backlight.watchdog.timeouts import StallLimits


@rule(STALL, monitor="stalls", version=2, limits=StallLimits, restates=True, logged=True)
def stall(run: Run, limits: StallLimits) -> Iterator[Finding]:
    """Report each stored diagnosis once; those that one machine left open are replaced by the joint one."""
    joint: list[Finding] = []
    if views := run.events(STALL_VIEWS):
        from backlight.watchdog.peers import joint_stalls  # noqa: PLC0415 - only after a stall of several machines

        joint = [stall.finding for stall in joint_stalls(views)]
    open_subjects = [event.payload.get("subject") for event in run.events(STALL) if event.payload.get("open")]
    replaced = {(finding.subject.verdict, finding.subject.rank) for finding in joint}
    reported: set[object] = set()
    files: dict[str, Evidence] = {}
    for finding in run.stored_findings():
        subject = finding.subject
        # At one line it is one stall, however long it lasts by the second diagnosis.
        key = subject if subject.line else (finding.title, finding.detail, subject.step)
        if finding.rule != STALL or key in reported:
            continue
        reported.add(key)
        is_replaced = (subject.verdict, subject.rank) in replaced
        if joint and (codec.plain(subject) in open_subjects or is_replaced):
            files.update({e.path: e for e in finding.evidence if e.path in run.evidence()})
            continue
        yield finding
    for finding in joint:
        yield dataclasses.replace(finding, evidence=(*files.values(), *finding.evidence))
