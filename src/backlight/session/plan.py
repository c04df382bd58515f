"""One capture plan from what the rooms ask for: which probes run, each once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from backlight.registry import PROBES, Needs, Probe

DEFAULT_ROOMS = ("health", "stalls", "steptime")


@dataclass(frozen=True)
class Active:
    """A probe in use: its declaration, its measuring object, and at which recorded steps it measures."""

    probe: Probe
    measuring: Any
    spacing: int


@dataclass(frozen=True)
class Plan:
    """The probes of a session by what they need."""

    rooms: tuple[str, ...]
    gradients: tuple[Active, ...]
    detailed: tuple[Active, ...]
    weights: tuple[Active, ...]
    steps: tuple[Active, ...]


def rooms_with_probes() -> tuple[str, ...]:
    """Return the rooms that measure something of a training, by name."""
    return tuple(sorted({"stalls", "grokking", "spectra"} | {probe.room for _, probe in PROBES.items()}))


def make_plan(
    rooms: Collection[str],
    requested: Collection[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """Build the probes of ``rooms``.

    Parameters
    ----------
    rooms:
        Rooms by name.
    requested:
        Names of probes that are otherwise only there on request.
    options:
        Keyword arguments by probe name; ``spacing`` replaces what the probe declares.

    Returns
    -------
    Plan
        The probes; gradient probes on request that nobody requested are in ``detailed``, for the
        steps after a finding.

    Raises
    ------
    ValueError
        If a room does not exist.
    """
    known = rooms_with_probes()
    for room in rooms:
        if room not in known:
            raise ValueError(f"no room is called {room!r}; expected some of: {', '.join(known)}")
    wanted = [p for _, p in PROBES.items() if p.room in rooms]
    on = [p for p in wanted if not p.on_request or p.name in requested]
    off = [p for p in wanted if p not in on and p.needs is Needs.GRADIENTS]

    def activate(probe: Probe) -> Active:
        given = dict((options or {}).get(probe.name, {}))
        spacing = int(given.pop("spacing", probe.spacing))
        return Active(probe, probe.make(**given), spacing)

    def made(probes: list[Probe], needs: Needs) -> tuple[Active, ...]:
        return tuple(activate(p) for p in probes if p.needs is needs)

    return Plan(
        tuple(rooms),
        made(on, Needs.GRADIENTS),
        made(off, Needs.GRADIENTS),
        made(on, Needs.WEIGHTS),
        made(on, Needs.STEPS),
    )
