"""What of the numbers that a spectrum gives is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that have a value: what a zero matrix leaves undefined is missing, not NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
