"""Free disk space of a run: when it runs short, the run stores less before the disk is full."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backlight.monitor import Recorder
from backlight.monitors.grokking.model.measures import TIERS, Measures, at_tier, left_out


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass
class DiskGuard:
    """Checks the free space at logged steps, and switches to the next cheaper tier when it is short.

    Attributes
    ----------
    threshold:
        Bytes that must stay free on the disk of ``path``.
    recorder:
        Gets ``disk_warning`` and ``degradation`` events.
    spacing:
        Logged steps between two checks.
    free:
        Returns the free bytes.
    """

    path: Path
    threshold: int
    recorder: Recorder
    tier: str = TIERS[0]
    spacing: int = 10
    free: Callable[[Path], int] = free_bytes
    checks: int = 0

    def cheaper_if_full(self, step: int, measures: Measures) -> Measures:
        """Return the measures to continue with; cheaper ones if less than the threshold is free."""
        self.checks += 1
        if (self.checks - 1) % self.spacing:
            return measures
        free = self.free(self.path)
        if free >= self.threshold:
            return measures
        level = TIERS.index(self.tier)
        warning = {"free": free, "threshold": self.threshold}
        if level == len(TIERS) - 1:
            if self.checks == 1:
                self.recorder.event(
                    step, "disk_warning", {**warning, "action": "only scalars are stored already"}
                )
            return measures
        before, self.tier = self.tier, TIERS[level + 1]
        cheaper = at_tier(measures, self.tier)
        action = f"from here on {self.tier} instead of {before}"
        self.recorder.event(step, "disk_warning", {**warning, "action": action})
        reason = f"{free} bytes are free, {self.threshold} must stay free"
        self.recorder.event(step, "degradation", degradation(before, self.tier, reason, measures, cheaper))
        return cheaper


def degradation(
    before: str, after: str, reason: str, measures: Measures, cheaper: Measures
) -> dict[str, object]:
    """Return the payload of an event ``degradation``."""
    return {"from": before, "to": after, "reason": reason, "left_out": list(left_out(measures, cheaper))}
