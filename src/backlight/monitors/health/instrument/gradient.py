"""The statistics of every gradient of a recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from backlight.measure.stats.statistics import statistics
from backlight.measure.transfer.batch import Carrier
from backlight.measure.transfer.pending import Pending
from backlight.registry import Needs, probe


@probe("gradient", monitor="health", needs=Needs.GRADIENTS, series="gradient")
class GradientProbe:
    """Norm, largest value, sum and counts per parameter, in one pass."""

    def measure(self, tensors: Sequence[Tensor | None], scale: Any, carrier: Carrier) -> Pending:
        """Measure local gradients, ``None`` where there is none; see :func:`statistics`."""
        return statistics(tensors, scale=scale, carrier=carrier)
