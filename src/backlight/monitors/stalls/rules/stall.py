"""Stored diagnoses of stalls, joined into one where several machines took part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from backlight.monitors.stalls.model.emit import RULE, as_finding
from backlight.monitors.stalls.model.peers import (
    DIAGNOSED,
    EVENT,
    JOIN_WINDOW_S,
    LEFT,
    join,
    only_ended,
    unpack,
)
from backlight.monitors.stalls.model.rank_diagnosis import UNOBSERVED, diagnose_ranks
from backlight.monitors.stalls.model.timeouts import StallLimits
from backlight.records import Evidence, Finding
from backlight.registry import rule
from backlight.store.read.run import Event, Run


@rule(RULE, monitor="stalls", version=2, limits=StallLimits, restates=True, logged=True)
def stall(run: Run, limits: StallLimits) -> Iterator[Finding]:
    """Report each stored diagnosis once; those that one machine left open are replaced by the joint one."""
    joint = list(_joint_findings(run))
    replaced = {(finding.subject.verdict, finding.subject.rank) for finding in joint}
    reported = set()
    files: dict[str, Evidence] = {}
    for finding in run.stored_findings():
        key = (finding.title, finding.detail, finding.subject.step)
        if finding.rule != RULE or key in reported:
            continue
        reported.add(key)
        is_replaced = (finding.subject.verdict, finding.subject.rank) in replaced
        if joint and (UNOBSERVED in finding.detail or is_replaced):
            files.update({e.path: e for e in finding.evidence if e.path in run.evidence()})
            continue
        yield finding
    for finding in joint:
        yield dataclasses.replace(finding, evidence=(*files.values(), *finding.evidence))


def _joint_findings(run: Run) -> Iterator[Finding]:
    events = sorted(run.events(EVENT), key=lambda event: (event.attempt, event.time))
    for attempt in dict.fromkeys(event.attempt for event in events):
        here = [event for event in events if event.attempt == attempt]
        for incident in _group_by_incident(here):
            left = [e for e in here if _reason(e) == LEFT and e.time <= incident[-1].time]
            # Newest first: of each rank the first observation counts.
            found = _joint_finding(incident[::-1], left[::-1])
            if found is not None:
                yield found


def _group_by_incident(events: list[Event]) -> list[list[Event]]:
    """Group observations: a second diagnosis of one machine is another stall, and so is what comes later."""
    incidents: list[list[Event]] = []
    for event in events:
        if _reason(event) == LEFT:
            continue
        is_second = (
            bool(incidents)
            and _reason(event) == DIAGNOSED
            and any(_host(e) == _host(event) and _reason(e) == DIAGNOSED for e in incidents[-1])
        )
        if not incidents or is_second or event.time - incidents[-1][0].time > JOIN_WINDOW_S:
            incidents.append([])
        incidents[-1].append(event)
    return incidents


def _reason(event: Event) -> str:
    return str(event.payload.get("why", ""))


def _host(event: Event) -> str:
    return str(event.payload.get("host", ""))


def _joint_finding(events: list[Event], left: list[Event]) -> Finding | None:
    """Diagnose by observations of about one time, and by the ranks that had ended before."""
    observed = [found for event in events if (found := unpack(event.payload)) is not None]
    ended = [only_ended(found) for event in left if (found := unpack(event.payload)) is not None]
    whole = join([*observed, *ended])
    hosts = {_host(event) for event in [*events, *left]}
    if whole is None or len(hosts) < 2 or not any(whole.diagnoses.values()):
        return None
    diagnosis = diagnose_ranks(whole.observations, whole.diagnoses, whole.groups, whole.world_size)
    if diagnosis is None:
        return None
    step = next((e.step for e in events if e.step is not None), None)
    evidence = [Evidence(f"events/{EVENT}", step=step, value=f"observed on {', '.join(sorted(hosts))}")]
    return as_finding(diagnosis, step, evidence)
