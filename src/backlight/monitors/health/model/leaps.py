"""Leaps out of the recent past, one value at a time: what the rule ``spike`` finds, as training goes on."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from backlight.findings.limits import limit, merge_overrides, with_overrides
from backlight.findings.recorded_steps import WORDS
from backlight.monitors.health.model.history import MAD_TO_DEVIATION, StretchLimits


@dataclass(frozen=True)
class LeapLimits(StretchLimits):
    """Limits of a leap of the total norm or the loss."""

    spike_window: int = limit(
        64, "recorded steps of history that a value is compared with; short, since losses trend", low=8
    )
    spike_minimum: int = limit(
        30, "finite values of history needed; the first steps of a run are steep", low=4
    )
    spike_deviations: float = limit(
        10.0,
        "robust standard deviations (1.4826 times the median absolute deviation) above the median; gradient "
        "noise has heavy tails, so that the 3 of a normal distribution would cry daily",
        source="Hampel 1974 for median and MAD; the factor is chosen",
        low=1.0,
    )
    spike_norm_ratio: float = limit(
        5.0,
        "a total norm must also exceed this many times its median: a smooth run has a MAD near 0, and "
        "recurrent nets leap by 4 in good health",
        low=1.0,
    )
    spike_loss_ratio: float = limit(
        1.5, "a loss must also exceed its median by this factor, for the same reason", low=1.0
    )


def live_limits(thresholds: Mapping[str, Mapping[str, float]]) -> LeapLimits:
    """Return the limits with the thresholds of the run, which the rule is evaluated with as well."""
    return with_overrides(LeapLimits, merge_overrides("health", overrides=thresholds.get("health")))


@dataclass
class LiveLeaps:
    """Norms and losses of the last steps of the same optimizers."""

    limits: LeapLimits
    _first: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._since, self._bound = 0, 0.0
        self._works, self._norms, self._losses = (
            deque[float](maxlen=self.limits.spike_window) for _ in range(3)
        )

    def add(self, norm: float | None, loss: float | None, counts: Mapping[str, float]) -> dict[str, float]:
        """Add a step, and return the median before it of each of ``norm`` and ``loss`` that leaps.

        As in the rule: above the median by a factor, and by robust standard deviations of the logarithms,
        once it is divided by what the step did more than those before it. ``counts`` holds those of
        :data:`backlight.findings.recorded_steps.WORDS`, relative to their first values instead of the medians
        of the run, which are not known yet. A history with values below 0 has no size to leap from.
        """
        work = 0.0
        for name in WORDS:
            count = counts.get(name)
            if count:
                share = count / self._first.setdefault(name, count)
                work = share if share > work else work
        work, works = work or 1.0, sorted(self._works)
        middle = len(works) // 2
        usual_work = (works[middle] + works[~middle]) / 2 if works else work
        self._works.append(work)
        more = work / usual_work if work > usual_work else 1.0
        leaping = {}
        for name, value, past, ratio in (
            ("norm", norm, self._norms, self.limits.spike_norm_ratio),
            ("loss", loss, self._losses, self.limits.spike_loss_ratio),
        ):
            usual = None if value is None else self._usual_of_leap(past, value / more, ratio)
            if usual is not None:
                leaping[name] = usual
            if value is not None:
                past.append(value)
        return leaping

    def leaps(self, loss: float) -> bool:
        """Add the loss of a step of which nothing else is known, and return whether it leaps."""
        self._since += 1
        if self._since > self.limits.spike_window // 4:
            self._since = 0
            self._bound = 0.0 if not self._losses else statistics.median(self._losses)
        # Sorting the history costs more than all else, and most losses are near the median of a while ago.
        is_high = not loss <= self._bound * (1 + self.limits.spike_loss_ratio) / 2
        usual = self._usual_of_leap(self._losses, loss, self.limits.spike_loss_ratio) if is_high else None
        self._losses.append(loss)
        return usual is not None

    def _usual_of_leap(self, past: deque[float], value: float, ratio: float) -> float | None:
        sizes = sorted([size for size in past if -math.inf < size < math.inf])
        count = len(sizes)
        if not count or sizes[0] < 0:
            return None
        if sizes[0] == 0:
            sizes = [size for size in sizes if size > 0]
            count = len(sizes)
        # Most values end here, without a logarithm: the median of these is no lower.
        if count < self.limits.spike_minimum or not ratio * sizes[(count - 1) // 2] < value:
            return None
        logs = [math.log(size) for size in sizes]
        middle = statistics.median(logs)
        usual = math.exp(middle)
        if not ratio * usual < value < math.inf:  # NaN included
            return None
        deviation = MAD_TO_DEVIATION * statistics.median(abs(log - middle) for log in logs)
        return usual if math.log(value) - middle > self.limits.spike_deviations * deviation else None
