"""The verdicts on stalls, as the sidecars stored them, and one diagnosis where several machines took part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from backlight.monitors.stalls.model.emit import as_finding
from backlight.monitors.stalls.model.joint_diagnosis import (
    KIND,
    LEAVES,
    UNSEEN,
    VERDICT,
    WINDOW,
    ended,
    together,
    unpack,
)
from backlight.monitors.stalls.model.rank_diagnosis import diagnose_ranks
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.records import Evidence, Finding
from backlight.registry import rule
from backlight.store.read.run import Event, Run


@rule("stall", monitor="stalls", version=2, restates=True)
def stall(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Give every stored verdict once; those that one machine left open are replaced by what all saw."""
    joined = list(_joined(run))
    better = {(finding.subject.verdict, finding.subject.rank) for finding in joined}
    said = set()
    files: dict[str, Evidence] = {}
    for finding in run.stored_findings():
        what = (finding.detail, finding.subject.step)
        if finding.rule != "stall" or what in said:
            continue
        said.add(what)
        if joined and (UNSEEN in finding.detail or (finding.subject.verdict, finding.subject.rank) in better):
            files.update({e.path: e for e in finding.evidence if e.path in run.evidence()})
            continue
        yield finding
    for finding in joined:
        yield dataclasses.replace(finding, evidence=(*files.values(), *finding.evidence))


def _joined(run: Run) -> Iterator[Finding]:
    """Take together what machines observed of one stall."""
    events = sorted(run.events(KIND), key=lambda event: (event.attempt, event.time))
    for attempt in dict.fromkeys(event.attempt for event in events):
        mine = [event for event in events if event.attempt == attempt]
        for incident in _incidents(mine):
            left = [e for e in mine if _why(e) == LEAVES and e.time <= incident[-1].time]
            found = _one(incident[::-1], left[::-1])
            if found is not None:
                yield found


def _incidents(events: list[Event]) -> list[list[Event]]:
    """Group observations: a second verdict of one machine is another stall, and so is what comes later."""
    out: list[list[Event]] = []
    for event in events:
        if _why(event) == LEAVES:
            continue
        again = bool(out) and _why(event) == VERDICT and _key(event) in {_key(e) for e in out[-1]}
        if not out or again or event.time - out[-1][0].time > WINDOW:
            out.append([])
        out[-1].append(event)
    return out


def _why(event: Event) -> str:
    return str(event.payload.get("why", ""))


def _key(event: Event) -> tuple[str, str]:
    return str(event.payload.get("host", "")), _why(event)


def _one(events: list[Event], earlier: list[Event]) -> Finding | None:
    """Attribute by observations of about one time, and by who had ended before, newest first."""
    now = [seen for event in events if (seen := unpack(event.payload)) is not None]
    before = [ended(seen) for event in earlier if (seen := unpack(event.payload)) is not None]
    whole = together([*now, *before])
    hosts = {str(event.payload.get("host", "")) for event in [*events, *earlier]}
    if whole is None or len(hosts) < 2 or not any(whole.diagnoses.values()):
        return None
    diagnosis = diagnose_ranks(whole.observations, whole.diagnoses, whole.groups, whole.world)
    if diagnosis is None:
        return None
    step = next((e.step for e in events if e.step is not None), None)
    evidence = [Evidence(f"events/{KIND}", step=step, value=f"observed on {', '.join(sorted(hosts))}")]
    return as_finding(diagnosis, step, evidence)
