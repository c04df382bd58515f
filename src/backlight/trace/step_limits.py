"""What limits a step: one decision, and its limits, for the rule, ``trace``, ``profile`` and its controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

HOST_CAUSES = ("host_bound", "launch_gap", "synchronisation")
"""Causes of idle time of a device for which the host is late."""


@dataclass(frozen=True)
class StepLimits:
    """Shares of a step from which a part of it is worth a word; ``host`` is a share of the idle time."""

    idle: float = 0.2
    host: float = 0.5
    exposed: float = 0.1
    data: float = 0.1
    optimizer: float = 0.1
    clip: float = 0.05
    copy: float = 0.05


LIMITS = StepLimits()


class Limit(StrEnum):
    """What a step waits for: its communication, the launching host, something else while idle, the device."""

    COMMUNICATION = "communication"
    LAUNCHES = "launches"
    IDLE = "idle"
    DEVICE = "device"


def limit_of(
    idle: float,
    causes: Mapping[str, float],
    exposed: float | None = None,
    *,
    limits: StepLimits = LIMITS,
) -> Limit:
    """Return what limits a step on a device.

    Parameters
    ----------
    idle, exposed
        Shares of the step in which the device is idle, and in which it communicates without computing.
    causes
        Parts of the idle time by cause, which add up to 1.
    """
    if (exposed or 0.0) >= max(limits.exposed, idle):
        return Limit.COMMUNICATION
    if idle <= limits.idle:
        return Limit.DEVICE
    return Limit.LAUNCHES if host_share(causes) > limits.host else Limit.IDLE


def host_share(causes: Mapping[str, float]) -> float:
    """Return the part of the idle time for which the host is late."""
    return sum(causes.get(name, 0.0) for name in HOST_CAUSES)
