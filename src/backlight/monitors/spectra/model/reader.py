"""What a run holds of this monitor, as its rules read it; see :mod:`backlight.store.format.spectra`.

The report and the export, which know no monitor, read the same from there. No torch.
"""

from __future__ import annotations

from backlight.store.format.spectra import FIELDS, NUMBERS, Layer, Measurement, Table
from backlight.store.read.spectra import layers, left_out, measurements, steps, table, tables

__all__ = [
    "FIELDS",
    "NUMBERS",
    "Layer",
    "Measurement",
    "Table",
    "layers",
    "left_out",
    "measurements",
    "steps",
    "table",
    "tables",
]
