"""Variation of step times between equal runs: measured from repeats where there are any, else assumed.

The steps of one run do not show it: clocks, memory layout and neighbours on the machine differ from run to
run. Source: ``docs/formulas.md``, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ASSUMED_DEVIATION = 0.0125
"""Deviation that is assumed without repeats; ``python bench/comparison.py`` gives the false alarms."""

MIN_FREEDOM = 2
"""Degrees of freedom of a measured deviation: three repeats of one run, or two of either."""


@dataclass(frozen=True)
class Variation:
    """Standard deviation of the logarithm of a run's median; ``freedom`` is infinite where it is assumed."""

    deviation: float
    freedom: float

    @property
    def is_measured(self) -> bool:
        """Return whether it comes from repeats."""
        return math.isfinite(self.freedom)


ASSUMED = Variation(ASSUMED_DEVIATION, math.inf)
NONE = Variation(0.0, math.inf)


def measure_variation(groups: Sequence[Sequence[float]]) -> Variation:
    """Return the deviation within groups of medians of equal runs; the assumed one where they are too few."""
    logs = [np.log(group) for group in groups if len(group) > 1 and min(group) > 0]
    freedom = sum(len(group) - 1 for group in logs)
    if not freedom:
        return ASSUMED
    deviation = math.sqrt(sum(float(np.square(group - group.mean()).sum()) for group in logs) / freedom)
    if freedom < MIN_FREEDOM:
        return Variation(max(deviation, ASSUMED_DEVIATION), math.inf)
    return Variation(deviation, float(freedom))
