"""Sparklines: the series behind a finding as a small picture, and any series as bars in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.records import Evidence
from backlight.report.charts import spans_decades, step_gaps, within
from backlight.report.evidence_links import Place
from backlight.report.source import COLUMNS, Series, Source, keep
from backlight.text import visible

BARS = "▁▂▃▄▅▆▇█"

POINTS = 160
"""Points of a sparkline on the page, which is that many pixels wide."""


def sparkline(values: NDArray[np.float64], width: int) -> str:
    """Return ``values`` [S] as at most ``width`` bars, each the last value of its share of the steps.

    What is not finite is an ``x``; values that spread over decades are drawn by their logarithms.
    """
    if not len(values) or width < 1:
        return ""
    ends = np.unique(np.linspace(0, len(values), min(width, len(values)) + 1).round().astype(int)[1:] - 1)
    shown = values[ends]
    finite = shown[np.isfinite(shown)]
    if not len(finite):
        return "x" * len(shown)
    if finite.min() > 0 and finite.max() / finite.min() > 100:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.where(np.isfinite(shown), np.log(np.where(shown > 0, shown, np.nan)), shown)
        finite = shown[np.isfinite(shown)]
    low, span = float(finite.min()), float(finite.max() - finite.min())
    return "".join(
        BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] if span and math.isfinite(value)
        else BARS[3] if math.isfinite(value) else "x"
        for value in shown
    )  # fmt: skip


def outstanding(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return of each of at most ``width`` shares of ``values`` [S] the one furthest from the median of all.

    One that is not finite is further than any.
    """
    middle = np.nanmedian(np.where(np.isfinite(values), values, np.nan))
    distance = np.where(np.isfinite(values), np.abs(values - middle), np.inf)
    parts = np.array_split(np.arange(len(values)), min(width, len(values)))
    return values[[part[np.argmax(distance[part])] for part in parts]]


def evidence_line(evidence: Iterable[tuple[Evidence, Place | None]], source: Source) -> dict[str, Any] | None:
    """Return the series of the first evidence that is one over steps, reduced to what a sparkline shows.

    ``step`` is that of the evidence. A value that is not finite is None. ``cuts`` are places before which
    nothing was recorded; a ``sampled`` series was recorded at every n-th step.
    """
    for item, place in evidence:
        steps, values, recorded = _series(item, place, source)
        if len(steps) < 2 or not np.isfinite(values).any():
            continue
        kept = keep([values], [np.ones(len(values), np.bool_)], POINTS)
        gaps = step_gaps(recorded)
        at = steps[kept]
        cuts = np.flatnonzero(within(gaps.breaks, (at[:-1] + at[1:]) / 2)) + 1
        # Three digits are finer than a pixel.
        shown = [float(f"{value:.3g}") if math.isfinite(value) else None for value in values[kept]]
        return {
            "path": visible(item.path),
            "steps": at.tolist(),
            "values": shown,
            "cuts": cuts.tolist(),
            "sampled": gaps.every > 1,
            "log": spans_decades(values),
            "step": item.step,
        }
    return None


def _series(evidence: Evidence, place: Place | None, source: Source) -> tuple[*Series, NDArray[np.int64]]:
    """Return steps and values of evidence, and the steps at which the series was recorded."""
    kind, _, name = evidence.path.partition("/")
    if kind in {"scalars", "user"}:
        scalar = source.scalar(name, "user" if kind == "user" else "backlight")
        return scalar.steps, scalar.values, scalar.steps
    shown = next((c for c in COLUMNS if place is not None and c.name == place.column), None)
    if place is None or place.row is None or shown is None or shown.name not in source.frames.extremes:
        return np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64)
    column = source.frames.extremes[shown.name]
    measured = column.measured[:, place.row] > 0
    steps = source.frames.buckets.first[measured]
    return steps, column.high[measured, place.row], source.frames.steps[shown.series]
