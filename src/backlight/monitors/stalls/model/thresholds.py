"""The thresholds of the stalls monitor: one frozen class, each field with its reason. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backlight.findings.limits import Limits, limit


@dataclass(frozen=True)
class Thresholds(Limits):
    """Every number that a verdict on a stall compares with; times are in seconds.

    ``metadata`` of each field holds its ``reason`` and the bounds of an override.
    """

    monitor: ClassVar[str] = "stalls"

    times_typical: float = limit(
        10.0, "a phase that takes ten times its moving time is no longer its usual self", low=1.0
    )
    floor: float = limit(
        30.0, "backward, clipping or optimizer: shorter than this nobody would look", low=0.1
    )
    floor_collective: float = limit(
        60.0, "inside a collective: the others may be compiling or writing a checkpoint", low=0.1
    )
    floor_forward: float = limit(
        60.0, "forward or loss: recompilation of a new shape takes this long", low=0.1
    )
    floor_data: float = limit(60.0, "waiting for data: a new epoch starts its workers", low=0.1)
    floor_other: float = limit(300.0, "between steps: the script may do anything there", low=0.1)
    idle: float = limit(0.05, "share of one core below which a process waits rather than works", high=1.0)
    busy: float = limit(0.6, "share of one core above which a thread computes without a pause", high=1.0)
    samples: float = limit(3.0, "looks at the stacks without which no claim about a line is made", low=2.0)
    window: float = limit(0.6, "seconds that the looks must span", low=0.1)
