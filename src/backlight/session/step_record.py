"""A recorded step on its way to the store: results that may still be on a device.

Everything that the step's path hands over is a reference; arrays and host numbers are made by the
thread that writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from backlight.measure.transfer import AsyncCopy, Slot, TransferBatch
from backlight.records import ParameterRecord
from backlight.store.format.schema import SERIES


@dataclass
class Part:
    """What one probe measured of some rows of the parameter table."""

    series: str
    rows: list[int]
    pending: Any
    part: int = 0


@dataclass
class Draft:
    """One recorded step.

    ``scalars`` hold numbers, and tables of one number that may still be on their way; ``transfer`` takes
    everything of the step to the host.
    """

    step: int
    records: tuple[ParameterRecord, ...]
    parts: list[Part] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    clips: list[tuple[str, float, Any]] = field(default_factory=list)
    scale: Any = None
    skipped: Any = None
    transfer: TransferBatch = field(default_factory=TransferBatch)

    def depart(self) -> None:
        """Send what the step measured on its way, tensors among the scalars included."""
        self.scalars = {name: self._enqueued(value) for name, value in self.scalars.items()}
        self.clips = [(kind, limit, self._enqueued(norm)) for kind, limit, norm in self.clips]
        self.scale = self._enqueued(self.scale)
        self.skipped = self._enqueued(self.skipped)
        self.transfer.start()

    def _enqueued(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().reshape(-1)[:1]
        return self.transfer.add((value.real if value.is_complex() else value).to(torch.float64))

    def ready(self) -> bool:
        """Whether every result has arrived on the host, so that nothing would wait."""
        single = (*self.scalars.values(), *(norm for _, _, norm in self.clips), self.scale, self.skipped)
        return all(part.pending.ready() for part in self.parts) and all(
            value.done() for value in single if isinstance(value, (AsyncCopy, Slot))
        )

    def arrays(self) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
        """Return float64 and int64 blobs ``[P, k]`` by series and part; unmeasured rows are 0."""
        blobs: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
        for part in self.parts:
            schema = SERIES[part.series]
            key = (part.series, part.part)
            if key not in blobs:
                count = len(self.records)
                blobs[key] = (
                    np.zeros((count, len(schema.floats))),
                    np.zeros((count, len(schema.integers)), dtype=np.int64),
                )
            floats, integers = part.pending.arrays()
            blobs[key][0][part.rows] = floats
            blobs[key][1][part.rows] = integers
        return blobs
