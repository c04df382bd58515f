"""Leaps out of the recent past, one value at a time: what the rule ``spike`` finds, as training goes on."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from backlight.monitors.health.model.history import MAD_TO_DEVIATION


@dataclass
class LiveHistory:
    """The last values of a positive scalar; ``median`` is theirs when the last value came."""

    window: int
    minimum: int
    deviations: float
    median: float = math.nan
    _values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._values = deque(maxlen=self.window)

    def leaps(self, value: float, ratio: float) -> bool:
        """Return whether ``value`` leaps by more than ``ratio``, and add it to the history.

        As in the rule: above the median by a factor, and by robust standard deviations of the logarithms.
        """
        known = self._values
        found = False
        self.median = statistics.median(known) if len(known) >= self.minimum else math.nan
        if math.isfinite(value) and value > ratio * self.median > 0:  # False for NaN
            logs = [math.log(one) for one in known if one > 0]
            middle = statistics.median(logs)
            deviation = MAD_TO_DEVIATION * statistics.median(abs(one - middle) for one in logs)
            found = math.log(value) - middle > self.deviations * deviation
        if math.isfinite(value):
            known.append(value)
        return found
