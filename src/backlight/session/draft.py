"""A recorded step on its way to the store: results that may still be on a device.

Everything that the step's path hands over is a reference; arrays and host numbers are made by the
thread that writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backlight.records import ParameterRecord
from backlight.store.schema import SERIES


@dataclass
class Part:
    """What one probe measured of some rows of the parameter table."""

    series: str
    rows: list[int]
    pending: Any
    part: int = 0


@dataclass
class Draft:
    """One recorded step; ``scalars`` may hold tensors that nobody has read yet."""

    step: int
    records: tuple[ParameterRecord, ...]
    parts: list[Part] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    clips: list[tuple[str, float, Any]] = field(default_factory=list)
    scale: Any = None
    skipped: Any = None

    def ready(self) -> bool:
        """Whether every result has arrived on the host, so that nothing would wait."""
        return all(part.pending.ready() for part in self.parts)

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
