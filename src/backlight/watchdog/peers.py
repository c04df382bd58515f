"""Observations that the watchdogs of several machines exchange, joined into one diagnosis. No torch.

A watchdog observes the ranks of its machine. When it has a diagnosis that other machines may explain, it
stores its observations and asks, by a small file in the run directory; the other watchdogs store theirs. The
reader decides as one watchdog that observes all ranks would. Clocks are those of the machines: the order of
events on two machines is known as well as they agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight import clock, codec
from backlight.records import DiagnosisKind, Evidence, Finding
from backlight.store.format.manifest import read_manifest
from backlight.store.format.names import MANIFEST, attempt_folder, watchdog_files
from backlight.store.format.schema import STALL, STALL_VIEWS
from backlight.watchdog.decision import decide
from backlight.watchdog.diagnosis import Cause
from backlight.watchdog.observation import Observation
from backlight.watchdog.reports import ENDED, RESUMED, as_finding
from backlight.watchdog.shared_state import StateSnapshot
from backlight.watchdog.text import Diagnosis, describe

if TYPE_CHECKING:
    from backlight.store.read.run import Event
    from backlight.store.write.watchdog import WatchdogWriter

DIAGNOSED, ANSWERED, LEFT = "verdict", "answer", "leaves"
"""Reason of an event with what one machine observed: a diagnosis made here, a question of another one, the
end of the last rank."""

JOIN_WINDOW_S = 60.0
"""Time between the observations of two machines that may belong to one stall."""

POLL_S = 1.0
"""Time between two checks for a question."""

MAX_HISTORY = 24
"""Snapshots of a rank's history that are stored."""

_TIMES = ("taken", "heartbeat", "phase_since", "node_since", "sampler")


@dataclass(frozen=True)
class HostObservation:
    """Observations of the ranks of one machine, and the cause of each alone."""

    observations: tuple[Observation, ...] = ()
    causes: dict[int, Cause | None] = field(default_factory=dict)
    world_size: int = 1


def pack(host: HostObservation) -> dict[str, Any]:
    """Return observations as JSON types, without stacks, and with times since the epoch."""
    shift = time.time_ns() - clock.monotonic_ns()
    packed = replace(host, observations=tuple(_packed(obs, shift) for obs in host.observations))
    data: dict[str, Any] = codec.plain(packed)
    return data


def unpack(data: Mapping[str, Any]) -> HostObservation | None:
    """Return what :func:`pack` has written, None for anything else."""
    try:
        return codec.convert(data, HostObservation)
    except ValueError:
        return None


def _packed(obs: Observation, shift: int) -> Observation:
    thinned = obs.history[:: max(len(obs.history) // MAX_HISTORY, 1)][-MAX_HISTORY:]
    reason = obs.exit_reason
    return Observation(
        obs.rank,
        obs.pid,
        snapshots=tuple(_shifted(state, shift) for state in obs.snapshots[-1:]),
        history=tuple(_shifted(replace(state, collectives=()), shift) for state in thinned),
        end=obs.end,
        ended_at=obs.ended_at + shift / 1e9 if obs.end is not None else 0.0,
        stopped=obs.stopped,
        groups=obs.groups,
        exit_reason=reason and replace(reason, at=reason.at + shift / 1e9),
    )


def _shifted(state: StateSnapshot, shift: int) -> StateSnapshot:
    times = {name: value + shift for name in _TIMES if (value := getattr(state, name))}
    return replace(state, arrived=b"", **times)


def only_ended(host: HostObservation) -> HostObservation:
    """Return of old observations what stays true: the ranks that had ended."""
    ended = [o for o in host.observations if o.end is not None or (o.state is not None and o.state.is_closed)]
    return replace(host, observations=tuple(ended))


def join(hosts: Iterable[HostObservation]) -> HostObservation | None:
    """Return the observations of several machines as one; of each rank the first counts."""
    observations: dict[int, Observation] = {}
    causes: dict[int, Cause | None] = {}
    world_size = 1
    for host in hosts:
        for obs in host.observations:
            rank = obs.rank
            if rank not in observations:
                observations[rank] = obs
                causes[rank] = host.causes.get(rank)
        world_size = max(world_size, host.world_size)
    if not observations:
        return None
    return HostObservation(tuple(o for _, o in sorted(observations.items())), causes, world_size)


class Peers:
    """The watchdogs of other machines, reached by files in the run directory; nothing waits for them."""

    def __init__(self, writer: WatchdogWriter) -> None:
        self._writer = writer
        self._answered_at = 0.0
        self._next_poll = 0.0

    def publish(self, reason: str, host: HostObservation) -> None:
        """Store the observations of this machine."""
        step = max((o.state.step for o in host.observations if o.state is not None), default=None)
        self._writer.event(step, STALL_VIEWS, {"host": self._writer.host, "why": reason, **pack(host)})

    def ask(self, timeout_s: float) -> None:
        """Ask the other machines for their observations after a timeout has passed here."""
        self._answered_at = clock.system_time()
        self._writer.ask({"at": self._answered_at, "allowed": timeout_s})

    def question_timeout_s(self) -> float | None:
        """Return the timeout of a new question of another machine, None where there is none."""
        now = clock.monotonic()
        if now < self._next_poll:
            return None
        self._next_poll = now + POLL_S
        asked = self._writer.asked()
        if asked is None or asked.get("host") == self._writer.host:
            return None
        at = asked.get("at")
        if (
            not isinstance(at, (int, float))
            or at <= self._answered_at
            or clock.system_time() - at > JOIN_WINDOW_S
        ):
            return None
        self._answered_at = float(at)
        return float(asked.get("allowed") or 0.0)


# Stalls as the watchdogs of all machines have stored them


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
    kinds = {STALL, STALL_VIEWS, RESUMED, ENDED}
    # The watchdog process, which starts with a training, reads no run.
    from backlight.store.read.run import open_run  # noqa: PLC0415

    return tuple(e for e in open_run(directory).events() if e.attempt in indices and e.kind in kinds)


def newest_stall(events: Sequence[Event]) -> ReportedStall | None:
    """Return the newest stall among the events of one attempt, of all its machines; None where none is."""
    slow = DiagnosisKind.SLOW.value
    made = [e for e in events if e.kind == STALL and e.payload.get("verdict") != slow]
    if not made:
        return None
    last = max(made, key=lambda event: event.time)
    ends = [e for e in events if e.kind in {RESUMED, ENDED} and e.time > last.time]
    over = "; ".join(f"rank {e.payload.get('rank')} {e.payload.get('how')}" for e in ends)
    # A machine stores its observations after its diagnosis.
    joint = [j for j in joint_stalls(e for e in events if e.kind == STALL_VIEWS) if j.time >= last.time]
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
        evidence = Evidence(
            f"events/{STALL_VIEWS}", step=self.step, value=f"observed on {', '.join(self.hosts)}"
        )
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
