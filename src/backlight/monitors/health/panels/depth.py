"""How the size of the gradient is distributed over the depth of the model."""

from __future__ import annotations

import numpy as np

from backlight.report.frames import SPREAD
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source


@panel(
    "depth",
    title="Distribution over depth",
    order=40,
    series=("series/gradient/depth",),
    note="Rms of the gradient of each parameter in model order: its spread over all recorded steps, and "
    "its value at the chosen step.",
    monitor="health",
)
def depth(source: Source) -> Drawn | NotMeasured:
    """Draw quantiles over steps per parameter; the chosen step comes from the heat map's data."""
    spread = source.frames.over_steps
    if spread is None or not np.isfinite(spread).any():
        return NotMeasured(source.reason("gradient", otherwise="No finite gradient was recorded."))
    return Drawn("depth", {"shares": list(SPREAD), "spread": spread})
