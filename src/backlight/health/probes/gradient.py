"""The statistics of every gradient of a recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from backlight.measure.carrier import Carrier
from backlight.measure.pending import Pending
from backlight.measure.statistics import statistics
from backlight.registry import Needs, probe


@probe("gradient", room="health", needs=Needs.GRADIENTS, series="gradient")
class GradientProbe:
    """Norm, largest value, sum and counts per parameter, in one pass."""

    def measure(self, tensors: Sequence[Tensor | None], scale: Any, carrier: Carrier) -> Pending:
        """Measure local gradients, ``None`` where there is none; see :func:`statistics`."""
        return statistics(tensors, scale=scale, carrier=carrier)
