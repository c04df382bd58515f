"""What limits a step: one decision, and its limits, for the rule, ``trace``, ``profile`` and its controls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

HOST_CAUSES = ("host_bound", "launch_gap", "synchronisation")
"""Causes of idle time of a device for which the host is late."""


@dataclass(frozen=True)
class StepLimits:
    """Shares of a step from which a part of it is worth a word; ``host`` is a share of the idle time.

    A part of the time above ``slow`` is worth a warning if its interval lies above ``slow_low``.
    """

    idle: float = 0.2
    host: float = 0.5
    slow: float = 0.2
    slow_low: float = 0.1
    exposed: float = 0.1
    data: float = 0.1
    optimizer: float = 0.1
    clip: float = 0.05
    copy: float = 0.05


LIMITS = StepLimits()


def is_slow(share: float, low: float, limits: StepLimits = LIMITS) -> bool:
    """Return whether a part of the time, with the lower end of its interval, is worth a warning."""
    return share > limits.slow and low > limits.slow_low


def lower_median(values: Sequence[float]) -> float:
    """Return the lower end of the one-sided 95 % interval of the median (sign test), 0 without one."""
    count, rank, below = len(values), 0, 1
    term = 1
    # As many values may lie below the median as a fair coin gives in fewer than 5 % of the cases.
    while rank < count and below < 0.05 * 2**count:
        rank += 1
        term = term * (count - rank + 1) // rank
        below += term
    return sorted(values)[rank - 1] if rank else 0.0


def lower_share(part: int, whole: int) -> float:
    """Return the lower end of the one-sided 95 % interval of a share of samples (Wilson), 0 without one."""
    if not whole:
        return 0.0
    z, p = 1.6449, part / whole
    spread = z * math.sqrt(p * (1 - p) / whole + (z / (2 * whole)) ** 2)
    return max(0.0, (p + z * z / (2 * whole) - spread) / (1 + z * z / whole))


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
