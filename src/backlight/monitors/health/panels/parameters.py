"""Panels of the parameters: heat map, groups, distribution over depth, exponents, updates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.health.model.parameters import GroupError, group_rms, ratio
from backlight.report.charts import Axis, Line, chart, step_gaps
from backlight.report.page_codec import Quantised
from backlight.report.panel import Drawn, NotMeasured, PanelFact, panel
from backlight.report.source import COLUMNS, SPREAD, ParameterFrames, Shown, Source, StepBuckets, cut
from backlight.series import HISTOGRAM_BINS, HISTOGRAM_LOWEST
from backlight.text import number, visible

MAX_EXACT_CELLS = 12_000
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
        _column(shown, frames, exact, cells <= MAX_EXACT_CELLS)
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
        "precise": cells <= MAX_EXACT_CELLS,
        "columns": columns,
        "measured": {
            series: _counts(frames.extremes[_name(series, frames)].measured) for series in frames.steps
        },
        "broken": {
            series: _counts(_broken(frames) if series == "gradient" else frames.extremes["ratio"].broken)
            for series in frames.steps
        },
        "stats": frames.stats,
        "gaps": {series: _gaps(steps) for series, steps in frames.steps.items()},
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


def _gaps(steps: NDArray[np.int64]) -> dict[str, Any]:
    gaps = step_gaps(steps)
    return {"breaks": gaps.breaks.ravel(), "sampled": gaps.sampled.ravel(), "every": gaps.every}


def _counts(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    return np.minimum(counts, 65535).astype(np.uint16).T


def _column(shown: Shown, frames: ParameterFrames, exact: bool, precise: bool) -> dict[str, Any]:
    reduced = frames.extremes[shown.name]

    def plane(values: NDArray[np.float64]) -> NDArray[np.float64] | Quantised:
        by_parameter = np.ascontiguousarray(values.T)
        return by_parameter if precise else Quantised(by_parameter, shown.scale)

    return {
        "name": shown.name,
        "series": shown.series,
        "label": shown.label,
        "scale": shown.scale,
        "meaning": shown.meaning,
        "high": plane(reduced.high),
        "low": None if exact else plane(reduced.low),
    }


MAX_LINES = 8
"""Lines that one chart can tell apart."""


@panel(
    "groups",
    title="Groups",
    order=62,
    series=("groups/rms",),
    note="Root mean square over all measured gradients of a group; groups of any size compare.",
    monitor="health",
    place="half",
)
def groups(source: Source) -> Drawn | NotMeasured:
    """Draw one line per group, and one per pair for the ratio of the first to the second."""
    groups, remarks = {}, []
    for name, pattern in source.run.groups.items():
        try:
            groups[name] = group_rms(source.run, pattern)
        except GroupError as error:
            remarks.append(f"Group {visible(name)} is not drawn: {visible(str(error))}.")
    if not groups:
        reason = source.reason(
            "group", otherwise="No group was named: backlight run --set groups.NAME=PATTERN."
        )
        return NotMeasured(" ".join(remarks) or reason)
    lines = [Line(name, rms.steps, rms.values, gaps=True) for name, rms in groups.items()]
    charts = [chart(lines[:MAX_LINES], Axis("rms (gradient)", log=True))]
    ratios, facts = [], []
    for (group, first), (other, second) in itertools.combinations(groups.items(), 2):
        values = ratio(first.values, second.values)
        ratios.append(Line(f"{group} / {other}", first.steps, values, gaps=True))
        finite = values[np.isfinite(values)]
        if finite.size:
            facts.append(PanelFact(f"median {group} / {other}", number(float(np.median(finite)))))
    if ratios:
        charts.append(chart(ratios[:MAX_LINES], Axis("ratio", log=True)))
    hidden = max(len(lines), len(ratios)) - MAX_LINES
    if hidden > 0:
        remarks.append(f"The first {MAX_LINES} lines of each chart are drawn.")
    return Drawn("lines", {"charts": charts}, tuple(facts[:4]), tuple(remarks))


@panel(
    "depth",
    title="Distribution over depth",
    order=64,
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


HISTOGRAM_RANGES = 600
"""Ranges of steps of the histogram over all parameters."""

HISTOGRAM_CELLS = 400_000
"""Cells (parameters x ranges x bins) of the histograms of single parameters."""


@panel(
    "exponents",
    title="Exponent histogram",
    order=66,
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
        frame = run.frame("histogram", f"b{place:02d}")
        if not len(frame.steps):
            return NotMeasured("No histogram was recorded.")
        if fine is None:
            buckets, coarse = _ranges(frame.steps, len(frame.names))
            fine = np.zeros((HISTOGRAM_BINS, len(buckets)))
            single = np.zeros((len(row), HISTOGRAM_BINS, len(coarse)))
            target = [row[name] for name in frame.names]
        counts = np.where(frame.measured, frame.values, 0).astype(np.float64)
        fine[place] = np.add.reduceat(counts.sum(axis=1), buckets.offsets(frame.steps)[1])
        single[target, place] = np.add.reduceat(counts, coarse.offsets(frame.steps)[1], axis=0).T
    assert fine is not None  # HISTOGRAM_BINS is not zero
    if not fine.any():
        return NotMeasured("No gradient value that is finite and not zero was counted.")
    data: dict[str, Any] = {
        "lowest": HISTOGRAM_LOWEST,
        "bins": HISTOGRAM_BINS,
        "all": {**_cells(buckets), "share": _share(fine, axis=0)},
        "single": {**_cells(coarse), "share": _share(single, axis=1)},
    }
    return Drawn("exponents", data)


def _ranges(steps: NDArray[np.int64], parameters: int) -> tuple[StepBuckets, StepBuckets]:
    coarse = max(8, min(200, HISTOGRAM_CELLS // max(1, parameters * HISTOGRAM_BINS)))
    return cut(steps, HISTOGRAM_RANGES), cut(steps, coarse)


def _cells(buckets: StepBuckets) -> dict[str, Any]:
    return {"first": buckets.first, "last": buckets.last}


def _share(counts: NDArray[np.float64], axis: int) -> Quantised:
    """Return the share of each bin along ``axis``; NaN where nothing was counted."""
    total = counts.sum(axis=axis, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Quantised(counts / total, "log")
