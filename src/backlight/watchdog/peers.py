"""Observations that the watchdogs of several machines exchange, and their join. No torch.

A watchdog observes the ranks of its machine. When it has a diagnosis that other machines may explain, it
stores its observations and asks, by a small file in the run directory; the other watchdogs store theirs. The
reader decides as one watchdog that observes all ranks would. Clocks are those of the machines: the order of
events on two machines is known as well as they agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from backlight import clock
from backlight.watchdog.diagnosis import Cause
from backlight.watchdog.observation import Observation
from backlight.watchdog.shared_state import StateSnapshot

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from backlight.store.write.watchdog import WatchdogWriter

EVENT = "stall_views"
"""Event that holds the observations of one machine."""

DIAGNOSED, ANSWERED, LEFT = "verdict", "answer", "leaves"
"""Reason of such an event: a diagnosis made here, a question of another machine, the end of the last rank."""

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


@cache
def _adapter() -> TypeAdapter[HostObservation]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - only runs of several machines need it

    return TypeAdapter(HostObservation)


def pack(host: HostObservation) -> dict[str, Any]:
    """Return observations as JSON types, without stacks, and with times since the epoch."""
    shift = time.time_ns() - clock.monotonic_ns()
    packed = replace(host, observations=tuple(_packed(obs, shift) for obs in host.observations))
    data: dict[str, Any] = _adapter().dump_python(packed, mode="json", exclude_defaults=True)
    return data


def unpack(data: Mapping[str, Any]) -> HostObservation | None:
    """Return what :func:`pack` has written, None for anything else."""
    try:
        return _adapter().validate_python(data)
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
            rank = obs.rank or 0
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
        self._writer.event(step, EVENT, {"host": self._writer.host, "why": reason, **pack(host)})

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
