"""The parameters as a heat map: steps across, parameters in model order down."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.encoding import Packed, pack, pack_log, pack_share
from backlight.report.frames import COLUMNS, ParameterFrames, Shown
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source

EXACT_CELLS = 12_000
"""Up to so many cells a column travels as float64; above, its values are quantised."""


@panel(
    "parameters",
    title="Parameters",
    order=30,
    series=("series/gradient", "series"),
    note="Every row is a parameter in model order, every column a range of steps.",
    monitor="health",
)
def parameters(source: Source) -> Drawn | NotMeasured:
    """Hand over the reduced columns of every parameter and the figures of the table below the map."""
    frames = source.frames
    if not frames.has("gradient"):
        return NotMeasured(source.reason("gradient", otherwise="No gradient was recorded."))
    exact = frames.buckets.exact
    cells = len(frames.buckets) * len(source.parameters)
    remarks = []
    if not exact:
        remarks.append(
            f"{sum(map(int, frames.buckets.recorded)):,} recorded steps are drawn as {len(frames.buckets):,} "
            "ranges; each keeps its smallest and its largest value, so that no spike is lost."
        )
    columns = [
        _column(shown, frames, exact, cells <= EXACT_CELLS)
        for shown in COLUMNS
        if shown.name in frames.extremes and frames.extremes[shown.name].measured.any()
    ]
    if not frames.has("update"):
        reason = source.reason("update", otherwise="No update was recorded.")
        remarks.append(f"The update ratio was not measured. {reason}")
    buckets = frames.buckets
    data: dict[str, Any] = {
        "first": buckets.first,
        "last": buckets.last,
        "recorded": buckets.recorded,
        "exact": exact,
        "precise": cells <= EXACT_CELLS,
        "columns": columns,
        "measured": {
            series: pack(_counts(frames.extremes[_name(series, frames)].measured)) for series in frames.steps
        },
        "broken": pack(_counts(_broken(frames))),
        "stats": frames.stats,
    }
    return Drawn("parameters", data, (), tuple(remarks))


def _name(series: str, frames: ParameterFrames) -> str:
    return next(shown.name for shown in COLUMNS if shown.series == series and shown.name in frames.extremes)


def _broken(frames: ParameterFrames) -> NDArray[np.int64]:
    """Steps [B, P] at which the gradient of a parameter was not finite."""
    broken = frames.extremes["rms"].broken
    if "non_finite" not in frames.extremes:
        return broken
    # A count is at least 1 somewhere in the bucket, even where the norm was still finite.
    counted = np.nan_to_num(frames.extremes["non_finite"].high) > 0
    return np.maximum(broken, counted.astype(np.int64))


def _counts(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    return np.minimum(counts, 65535).astype(np.uint16).T


def _column(shown: Shown, frames: ParameterFrames, exact: bool, precise: bool) -> dict[str, Any]:
    reduced = frames.extremes[shown.name]

    def plane(values: NDArray[np.float64]) -> Packed:
        by_parameter = np.ascontiguousarray(values.T)
        if precise:
            return pack(by_parameter)
        return pack_share(by_parameter) if shown.scale == "share" else pack_log(by_parameter)

    return {
        "name": shown.name,
        "series": shown.series,
        "label": shown.label,
        "scale": shown.scale,
        "meaning": shown.meaning,
        "high": plane(reduced.high),
        "low": None if exact else plane(reduced.low),
    }
