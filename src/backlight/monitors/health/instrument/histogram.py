"""Exponent histograms of gradients, on request and while a finding is looked at in detail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from backlight.measure.stats.histogram import histogram
from backlight.measure.transfer import Pending, TransferBatch
from backlight.registry import Needs, probe


@probe("histogram", monitor="health", needs=Needs.GRADIENTS, series="histogram", on_request=True)
class HistogramProbe:
    """Counts of values per power of two, per parameter."""

    def measure(self, tensors: Sequence[Tensor | None], scale: Any, transfer: TransferBatch) -> Pending:
        """Count local gradients, ``None`` where there is none; see :func:`histogram`."""
        return histogram(tensors, scale=scale, transfer=transfer)
