"""The disk of a run, watched while it is written: what it keeps shrinks before the disk is full."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backlight.monitors.grokking.model.measures import TIERS, at_tier, left_out

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.tracker import Sink
    from backlight.monitors.grokking.model.measures import Measures


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass
class DiskWatch:
    """Looks at the free space at logged steps, and takes the next cheaper tier where it is short.

    Attributes
    ----------
    path, threshold:
        The run's folder, and the bytes that its disk is to have free.
    sink:
        Gets ``disk_warning`` and ``degradation`` events.
    tier:
        What is kept now.
    spacing:
        Logged steps between two looks.
    free:
        How the free bytes are found.
    """

    path: Path
    threshold: int
    sink: Sink
    tier: str = TIERS[0]
    spacing: int = 10
    free: Callable[[Path], int] = free_bytes
    looks: int = 0

    def look(self, step: int, measures: Measures) -> Measures:
        """Return the measures to go on with; cheaper ones where less than the threshold is free."""
        self.looks += 1
        if (self.looks - 1) % self.spacing:
            return measures
        free = self.free(self.path)
        if free >= self.threshold:
            return measures
        place = TIERS.index(self.tier)
        warning = {"free": free, "threshold": self.threshold}
        if place == len(TIERS) - 1:
            if self.looks == 1:
                self.sink.event(
                    step, "disk_warning", {**warning, "action": "scalars are all that is kept already"}
                )
            return measures
        before, self.tier = self.tier, TIERS[place + 1]
        cheaper = at_tier(measures, self.tier)
        action = f"from here on {self.tier} in place of {before}"
        self.sink.event(step, "disk_warning", {**warning, "action": action})
        reason = f"{free} bytes free, {self.threshold} are to stay free"
        self.sink.event(step, "degradation", degradation(before, self.tier, reason, measures, cheaper))
        return cheaper


def degradation(
    before: str, after: str, reason: str, measures: Measures, cheaper: Measures
) -> dict[str, object]:
    """Return the payload of an event ``degradation``."""
    return {"from": before, "to": after, "reason": reason, "left_out": list(left_out(measures, cheaper))}
