"""Sparklines: the series behind a finding as a small picture, and any series as bars in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.records import Evidence
from backlight.report.charts import spans_decades
from backlight.report.evidence_links import Place
from backlight.report.frames import keep
from backlight.report.source import Series, Source
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

    ``step`` is that of the evidence. A value that is not finite is None.
    """
    for one, place in evidence:
        steps, values = _series(one, place, source)
        if len(steps) < 2 or not np.isfinite(values).any():
            continue
        kept = keep([values], [np.ones(len(values), np.bool_)], POINTS)
        # Three digits are finer than a pixel.
        shown = [float(f"{value:.3g}") if math.isfinite(value) else None for value in values[kept]]
        return {
            "path": visible(one.path),
            "steps": steps[kept].tolist(),
            "values": shown,
            "log": spans_decades(values),
            "step": one.step,
        }
    return None


def _series(evidence: Evidence, place: Place | None, source: Source) -> Series:
    kind, _, name = evidence.path.partition("/")
    if kind in {"scalars", "user"}:
        scalar = source.scalar(name, "user" if kind == "user" else "backlight")
        return scalar.steps, scalar.values
    column = source.frames.extremes.get(place.column or "") if place is not None else None
    if place is None or place.row is None or column is None:
        return np.empty(0, np.int64), np.empty(0)
    high = column.high[:, place.row]
    measured = column.measured[:, place.row] > 0
    return source.frames.buckets.first[measured], high[measured]
