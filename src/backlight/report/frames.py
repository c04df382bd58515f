"""The per-parameter series of a run, read once and reduced to what the page can show.

Shapes: S recorded steps, P parameters in model order, B buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backlight.records import ParameterRecord
from backlight.report.reduction import Buckets, Extremes, cut, extremes, quantiles
from backlight.store.read.run import Run

CELLS = 450_000
"""Cells (parameters x buckets) of a heat map: five columns of them stay below 10 MB of page."""

FEWEST_BUCKETS, MOST_BUCKETS = 48, 4000
"""Not worth looking at below, finer than any screen above."""

SPREAD = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Quantiles shown of a distribution: smallest, lower tenth, median, upper tenth, largest."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shown:
    """A column of the format as the heat map shows it; ``scale`` is ``log``, ``share`` or ``count``."""

    name: str
    series: str
    column: str
    label: str
    scale: str
    meaning: str


COLUMNS = (
    Shown("rms", "gradient", "rms", "rms", "log", "root mean square of the gradient"),
    Shown("max_abs", "gradient", "max_abs", "largest |g|", "log", "largest absolute value of the gradient"),
    Shown("zero_share", "gradient", "zero_share", "zeros", "share", "share of values that are exactly zero"),
    Shown("non_finite", "gradient", "non_finite", "NaN and Inf", "count", "values that are NaN or infinite"),
    Shown(
        "ratio", "update", "ratio", "update / weight", "log", "norm of the step taken over the weight's norm"
    ),
)


@dataclass
class ParameterFrames:
    """What was read: extremes per bucket, and exact figures over all recorded steps.

    ``steps`` and ``extremes`` are keyed by series and by :class:`Shown` name; ``stats`` are ``[P]``
    each; ``over_steps`` holds, per parameter, the ``SPREAD`` of its finite rms ``[5, P]``;
    ``ratio_spread`` holds, per step of the update series, the ``SPREAD`` over parameters ``[5, S]``.
    """

    buckets: Buckets
    steps: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    extremes: dict[str, Extremes] = field(default_factory=dict)
    stats: dict[str, Floats] = field(default_factory=dict)
    over_steps: Floats | None = None
    ratio_spread: Floats | None = None

    def has(self, series: str) -> bool:
        """Tell whether at least one value of ``series`` was measured."""
        return any(
            shown.series == series and bool(self.extremes[shown.name].measured.any())
            for shown in COLUMNS
            if shown.name in self.extremes
        )


def read_frames(
    run: Run, parameters: tuple[ParameterRecord, ...], attempt: int | None, cells: int | None = None
) -> ParameterFrames:
    """Read every column of :data:`COLUMNS` once and reduce it; one frame is in memory at a time.

    A column is reduced to ``cells`` (parameters x buckets) at most, by default :data:`CELLS`.
    """
    present = [series for series in ("gradient", "update") if run.has(series)]
    every = [_steps(run, series, attempt) for series in present]
    steps = np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)
    amount = len(parameters)
    most = min(MOST_BUCKETS, max(FEWEST_BUCKETS, (CELLS if cells is None else cells) // max(1, amount)))
    frames = ParameterFrames(cut(steps, most))
    for shown, at, values, measured in _columns(run, parameters, attempt, present):
        frames.steps.setdefault(shown.series, at)
        frames.extremes[shown.name] = extremes(values, measured, at, frames.buckets)
        values[~measured] = np.nan
        _figures(frames, shown.name, values, measured)
    return frames


def _steps(run: Run, series: str, attempt: int | None) -> NDArray[np.int64]:
    if attempt is None:
        return run.series_steps(series)
    column = next(shown.column for shown in COLUMNS if shown.series == series)
    return run.frame(series, column, attempt=attempt).steps


def _columns(
    run: Run, parameters: tuple[ParameterRecord, ...], attempt: int | None, present: list[str]
) -> Iterator[tuple[Shown, NDArray[np.int64], Floats, NDArray[np.bool_]]]:
    """Yield each column that was recorded, its rows in the order of ``parameters``."""
    row = {record.name: index for index, record in enumerate(parameters)}
    for shown in COLUMNS:
        if shown.series not in present:
            continue
        frame = run.frame(shown.series, shown.column, attempt=attempt)
        if not len(frame.steps):
            continue
        values = frame.values.astype(np.float64)
        measured = frame.measured
        if frame.names != tuple(row):
            known = [index for index, name in enumerate(frame.names) if name in row]
            target = [row[frame.names[index]] for index in known]
            whole = np.full((len(frame.steps), len(row)), np.nan)
            mask = np.zeros(whole.shape, np.bool_)
            whole[:, target], mask[:, target] = values[:, known], measured[:, known]
            values, measured = whole, mask
        yield shown, frame.steps, values, measured


def _figures(frames: ParameterFrames, name: str, values: Floats, measured: NDArray[np.bool_]) -> None:
    """Add the exact figures of one column; ``values`` [S, P] are NaN where not measured."""
    by_parameter = np.ascontiguousarray(values.T)
    if name in {"rms", "ratio"}:
        spread = quantiles(by_parameter, SPREAD)
        frames.stats[f"{name}_median"], frames.stats[f"{name}_max"] = spread[2], spread[4]
        frames.stats[f"{name}_last"] = _last(by_parameter, measured)
    if name == "rms":
        frames.over_steps = spread
        frames.stats["measured"] = measured.sum(axis=0).astype(np.float64)
    elif name == "ratio":
        frames.ratio_spread = quantiles(values, SPREAD)
    elif name == "max_abs":
        frames.stats["max_abs_max"] = quantiles(by_parameter, (1.0,))[0]
    elif name == "zero_share":
        frames.stats["zero_share_last"] = _last(by_parameter, measured)
    elif name == "non_finite":
        total = np.nansum(values, axis=0)
        frames.stats["non_finite_sum"] = np.where(measured.any(axis=0), total, np.nan)


def _last(by_parameter: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Return the value [P] at the last step at which each parameter was measured, NaN if never."""
    last = measured.shape[0] - 1 - np.argmax(measured[::-1], axis=0)
    value = by_parameter[np.arange(len(by_parameter)), last]
    return np.where(measured.any(axis=0), value, np.nan)
