"""Stalls as the watchdogs of all machines have stored them, each joined into one diagnosis. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backlight.records import DiagnosisKind, Evidence, Finding
from backlight.store.format.manifest import read_manifest
from backlight.store.format.names import MANIFEST, attempt_folder, watchdog_files
from backlight.store.read.run import Event, open_run
from backlight.watchdog.decision import decide
from backlight.watchdog.peers import DIAGNOSED, EVENT, JOIN_WINDOW_S, LEFT, join, only_ended, unpack
from backlight.watchdog.reports import ENDED, RESUMED, RULE, as_finding
from backlight.watchdog.text import Diagnosis, describe


@dataclass(frozen=True)
class ReportedStall:
    """The newest stall of an attempt.

    ``is_open`` is whether another machine has not stored what it observes; ``over`` says how it was resolved,
    empty while it lasts.
    """

    claim: str
    rank: int | None
    time: float
    is_open: bool = False
    over: str = ""


def stall_events(directory: Path, launch: str) -> tuple[Event, ...]:
    """Return what the watchdogs have stored in the attempt of ``launch``; nothing where none has stalled.

    RunFormatError where the run cannot be read.
    """
    if not (directory / MANIFEST).exists():
        return ()
    indices = {entry.index for entry in read_manifest(directory).attempts if entry.launch == launch}
    if not any(watchdog_files(directory / attempt_folder(index)) for index in indices):
        return ()
    kinds = {RULE, EVENT, RESUMED, ENDED}
    return tuple(e for e in open_run(directory).events() if e.attempt in indices and e.kind in kinds)


def newest_stall(events: Sequence[Event]) -> ReportedStall | None:
    """Return the newest stall among the events of one attempt, of all its machines; None where none is."""
    slow = DiagnosisKind.SLOW.value
    made = [e for e in events if e.kind == RULE and e.payload.get("verdict") != slow]
    if not made:
        return None
    last = max(made, key=lambda event: event.time)
    ends = [e for e in events if e.kind in {RESUMED, ENDED} and e.time > last.time]
    over = "; ".join(f"rank {e.payload.get('rank')} {e.payload.get('how')}" for e in ends)
    # A machine stores its observations after its diagnosis.
    joint = [j for j in joint_stalls(e for e in events if e.kind == EVENT) if j.time >= last.time]
    payload = last.payload
    claim, rank, verdict = str(payload.get("claim", "")), payload.get("rank"), payload.get("verdict")
    unobserved = payload.get("unobserved")
    if joint:
        diagnosis, unobserved = joint[-1].diagnosis, joint[-1].unobserved
        claim, rank, verdict = diagnosis.claim, diagnosis.rank, diagnosis.kind
    # Other machines know the cause, or who waits for it; a rank that is dead, the framework handles at once.
    is_open = bool(unobserved) and verdict != DiagnosisKind.DEAD
    return ReportedStall(claim, rank if isinstance(rank, int) else None, last.time, is_open, over)


@dataclass(frozen=True)
class JointStall:
    """A stall that several machines observed, and the time of the last observation.

    ``unobserved`` is the number of ranks without an observation.
    """

    time: float
    step: int | None
    diagnosis: Diagnosis
    hosts: tuple[str, ...]
    unobserved: int

    @property
    def finding(self) -> Finding:
        """The stall as a finding."""
        evidence = Evidence(f"events/{EVENT}", step=self.step, value=f"observed on {', '.join(self.hosts)}")
        return as_finding(self.diagnosis, self.step, (evidence,))


def joint_stalls(events: Iterable[Event]) -> Iterator[JointStall]:
    """Yield each stall that several machines observed."""
    ordered = sorted(events, key=lambda event: (event.attempt, event.time))
    for attempt in dict.fromkeys(event.attempt for event in ordered):
        here = [event for event in ordered if event.attempt == attempt]
        for incident in _group_by_incident(here):
            left = [e for e in here if _reason(e) == LEFT and e.time <= incident[-1].time]
            # Newest first: of each rank the first observation counts.
            stall = _joint_stall(incident[::-1], left[::-1])
            if stall is not None:
                yield stall


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


def _joint_stall(events: list[Event], left: list[Event]) -> JointStall | None:
    """Decide by observations of about one time, and by the ranks that had ended before."""
    observed = [host for event in events if (host := unpack(event.payload)) is not None]
    ended = [only_ended(host) for event in left if (host := unpack(event.payload)) is not None]
    whole = join([*observed, *ended])
    hosts = {_host(event) for event in [*events, *left]}
    if whole is None or len(hosts) < 2 or not any(whole.causes.values()):
        return None
    decision = decide(whole.observations, whole.causes, whole.world_size)
    if decision is None:
        return None
    step = next((e.step for e in events if e.step is not None), None)
    unobserved = whole.world_size - len(whole.observations)
    return JointStall(events[0].time, step, describe(decision), tuple(sorted(hosts)), unobserved)
