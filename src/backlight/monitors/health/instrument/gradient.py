"""The statistics of every gradient of a recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from backlight.measure.stats.statistics import statistics
from backlight.measure.transfer import Pending, TransferBatch
from backlight.registry import Needs, probe


@probe("gradient", monitor="health", needs=Needs.GRADIENTS, series="gradient")
class GradientProbe:
    """Norm, largest value, sum and counts per parameter, in one pass."""

    def measure(self, tensors: Sequence[Tensor | None], scale: Any, transfer: TransferBatch) -> Pending:
        """Measure local gradients, ``None`` where there is none; see :func:`statistics`."""
        return statistics(tensors, scale=scale, transfer=transfer)
