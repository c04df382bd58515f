"""The tiers in which measures of gradient geometry are stored, and the room that they take."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backlight.monitors.grokking.settings import Measures
from backlight.text import size

if TYPE_CHECKING:
    from backlight.monitor import Recorder

TIERS = ("full factors", "top-k", "Gram", "scalars")
"""What a run stores, from most to least: without full factors no gradient is stored, without top-k no
eigenvectors and no sketch, with scalars alone neither matrices nor spectra."""


def at_tier(measures: Measures, tier: str) -> Measures:
    """Return the measures as ``tier`` stores them; all are still computed."""
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: expected one of {', '.join(TIERS)}")
    level = TIERS.index(tier)
    if level >= 1:
        measures = replace(measures, gradients=0, mean_gradient=0)
    if level >= 2:
        measures = replace(measures, vectors=0, sketch=0)
    if level >= 3:
        measures = replace(measures, matrices=False, spectra=False)
    return measures


def left_out(before: Measures, after: Measures) -> tuple[str, ...]:
    """Name what ``before`` stores and ``after`` does not."""
    names = {
        "gradients": "gradient",
        "mean_gradient": "mean_gradient",
        "vectors": "gram/*/vectors",
        "sketch": "sketch",
        "matrices": "matrices",
        "spectra": "eigenvalues",
    }
    return tuple(label for key, label in names.items() if getattr(before, key) and not getattr(after, key))


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that have a value: one that is undefined (a zero matrix) is left out, not NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass
class DiskGuard:
    """Checks the free space at logged steps, and switches to the next cheaper tier when it is short.

    ``threshold`` bytes must stay free on the disk of ``path``; ``spacing`` is the number of logged steps
    between two checks. The recorder gets ``disk_warning`` and ``degradation`` events, and ``warn`` the
    first change of the tier: later ones are in the result.
    """

    path: Path
    threshold: int
    recorder: Recorder
    warn: Callable[[str], None]
    tier: str = TIERS[0]
    spacing: int = 10
    free: Callable[[Path], int] = free_bytes
    checks: int = 0
    has_warned: bool = False

    def cheaper_if_full(self, step: int, measures: Measures) -> Measures:
        """Return the measures to continue with; cheaper ones if less than the threshold is free."""
        self.checks += 1
        if (self.checks - 1) % self.spacing:
            return measures
        free = self.free(self.path)
        if free >= self.threshold:
            return measures
        warning = {"free": free, "threshold": self.threshold}
        if self.tier == TIERS[-1]:
            if self.checks == 1:
                action = "only scalars are stored already"
                self.recorder.event(step, "disk_warning", {**warning, "action": action})
            return measures
        before, self.tier = self.tier, TIERS[TIERS.index(self.tier) + 1]
        cheaper = at_tier(measures, self.tier)
        action = f"from here on {self.tier} instead of {before}"
        self.recorder.event(step, "disk_warning", {**warning, "action": action})
        reason = f"{size(free)} of disk are free, and {size(self.threshold)} must stay free"
        self.recorder.event(step, "degradation", degradation(before, self.tier, reason, measures, cheaper))
        if not self.has_warned:
            self.has_warned = True
            missing = ", ".join(left_out(measures, cheaper)) or "nothing that was requested"
            self.warn(
                f"{reason}; from step {step} on the run stores {self.tier} instead of {before} (left out: "
                f"{missing})"
            )
        return cheaper


def degradation(
    before: str, after: str, reason: str, measures: Measures, cheaper: Measures
) -> dict[str, object]:
    """Return the payload of an event ``degradation``."""
    return {"from": before, "to": after, "reason": reason, "left_out": list(left_out(measures, cheaper))}
