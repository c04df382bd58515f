"""The exponents of the gradient's values: what sits near zero, what near the edge of a number format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.encoding import Packed, pack_log
from backlight.report.frames import Buckets, cut
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.store.format.schema import HISTOGRAM_BINS, HISTOGRAM_LOWEST

RANGES = 600
"""Ranges of steps of the histogram over all parameters."""

CELLS = 400_000
"""Cells (parameters x ranges x bins) of the histograms of single parameters."""


@panel(
    "exponents",
    title="Exponent histogram",
    order=45,
    series=("series/histogram",),
    note="Share of gradient values by their power of two. Exact zeros, NaN and Inf have no exponent and are "
    "left out.",
    monitor="health",
)
def exponents(source: Source) -> Drawn | NotMeasured:
    """Draw the histogram over steps, of all parameters together and of each one in coarser ranges."""
    run = source.run
    if not run.has("histogram"):
        return NotMeasured(
            source.reason("histogram", otherwise="It is recorded on request: backlight run --histogram.")
        )
    row = {record.name: index for index, record in enumerate(source.parameters)}
    fine: NDArray[np.float64] | None = None
    for place in range(HISTOGRAM_BINS):
        frame = run.frame("histogram", f"b{place:02d}", attempt=source.attempt)
        if not len(frame.steps):
            return NotMeasured("No histogram was recorded in this attempt.")
        if fine is None:
            buckets, coarse = _ranges(frame.steps, len(frame.names))
            fine = np.zeros((HISTOGRAM_BINS, len(buckets)))
            single = np.zeros((len(row), HISTOGRAM_BINS, len(coarse)))
            target = [row[name] for name in frame.names]
        counts = np.where(frame.measured, frame.values, 0).astype(np.float64)
        fine[place] = np.add.reduceat(counts.sum(axis=1), buckets.offsets(frame.steps)[1])
        single[target, place] = np.add.reduceat(counts, coarse.offsets(frame.steps)[1], axis=0).T
    assert fine is not None  # HISTOGRAM_BINS is not zero
    data: dict[str, Any] = {
        "lowest": HISTOGRAM_LOWEST,
        "bins": HISTOGRAM_BINS,
        "all": {**_cells(buckets), "share": _share(fine, axis=0)},
        "single": {**_cells(coarse), "share": _share(single, axis=1)},
    }
    return Drawn("exponents", data)


def _ranges(steps: NDArray[np.int64], parameters: int) -> tuple[Buckets, Buckets]:
    coarse = max(8, min(200, CELLS // max(1, parameters * HISTOGRAM_BINS)))
    return cut(steps, RANGES), cut(steps, coarse)


def _cells(buckets: Buckets) -> dict[str, Any]:
    return {"first": buckets.first, "last": buckets.last}


def _share(counts: NDArray[np.float64], axis: int) -> Packed:
    """Pack the share of each bin along ``axis``; NaN where nothing was counted."""
    total = counts.sum(axis=axis, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return pack_log(counts / total)
