"""Charts over steps: scalars on one axis, reduced to what a chart can show, with the gaps between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.source import keep, reduced_to

Ints = NDArray[np.int64]
Ranges = NDArray[np.int64]
"""Pairs of steps ``[R, 2]``, sorted; each begins and ends at a recorded step."""

NEIGHBOURS = 6
"""Spacings on each side that one is compared with."""

ALIKE = 4
"""Neighbours of a like spacing that make it regular."""


@dataclass(frozen=True)
class StepGaps:
    """Where a series was not recorded.

    Between the steps of one of ``breaks`` nothing is known: more steps are missing than is usual around them.
    Within ``sampled`` the series was recorded regularly, but not at each step: every ``every`` steps, in the
    mean where neighbours are among them.
    """

    breaks: Ranges
    sampled: Ranges
    every: int


def step_gaps(steps: Ints) -> StepGaps:
    """Return the gaps of a series that was recorded at sorted ``steps`` [S].

    A spacing of more than one step is regular if enough of those around it are like it: wide as well, from
    half of it to four times as wide. Spacings that only grow, one among single steps, and the way to a last
    step far behind are breaks.
    """
    steps = np.asarray(steps, np.int64)
    spacing = np.diff(steps)
    wide = spacing > 1
    if not wide.any():
        return StepGaps(_NONE, _NONE, 1)
    padded = np.pad(spacing, NEIGHBOURS)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
    around = np.delete(around, NEIGHBOURS, axis=1)
    alike = ((around > 1) & (2 * around >= spacing[:, None]) & (around <= 4 * spacing[:, None])).sum(axis=1)
    wanted = np.clip((around > 0).sum(axis=1), 1, ALIKE)
    sampled = wide & (alike >= wanted)
    broken = wide & ~sampled
    every = int(np.median(spacing[sampled])) if sampled.any() else 1
    # Two neighbouring steps among samples are samples as well: a dotted line with a solid dash says nothing.
    lone = ~wide & ~np.roll(~wide, 1) & ~np.roll(~wide, -1)
    sampled |= lone & (np.roll(sampled, 1) | np.roll(sampled, -1))
    if (sampled & lone).any():  # such as the updates of two optimizers that step in turn
        every = round(float(spacing[sampled].mean()))
    breaks = np.stack([steps[:-1][broken], steps[1:][broken]], axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]])))
    return StepGaps(breaks, np.stack([steps[edges[::2]], steps[edges[1::2]]], axis=1), every)


def within(ranges: Ranges, at: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each of ``at`` whether it lies strictly inside one of ``ranges``."""
    if not len(ranges):
        return np.zeros(len(at), np.bool_)
    place = np.searchsorted(ranges[:, 0], at, side="left") - 1
    inside: NDArray[np.bool_] = (place >= 0) & (at < ranges[np.maximum(place, 0), 1])
    return inside


_NONE: Ranges = np.empty((0, 2), np.int64)


NUMBERS = 30_000
"""Numbers that one chart may hold before it is reduced to the extremes of its buckets."""

MAX_BREAKS = 2000
"""Breaks of a line that are drawn, the longest ones: of more, most are narrower than a pixel."""

TONES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""Colours of lines that have no colour of their own, in order."""

SLOW_SHARE, SLOW_FACTOR = 0.95, 4.0
"""A step of this many times the quantile of all is marked beyond the end of an axis of times."""

WIDTH = 0.005
"""Width of a line, as a share of the height of its chart."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: ``values`` [S] at ``steps`` [S].

    ``axis`` is ``left`` or ``right``; ``style`` is ``line``, ``dashed``, ``steps``, ``edge`` (the border
    of a band that the legend names, filled down to the line whose label is ``down_to``) or ``area`` (stacked
    on the areas before it); ``tone`` names a colour of the page. With ``gaps`` a NaN means "not measured";
    without, it is a measured value that is not finite. ``recorded`` are the steps behind values that were
    reduced to ranges of steps.
    """

    label: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    axis: str = "left"
    style: str = "line"
    tone: str = ""
    down_to: str = ""
    gaps: bool = False
    recorded: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Axis:
    """A vertical axis: its label with the unit, its scale, and limits where they are given by the matter.

    Values beyond ``top`` are marked at the upper end until the reader asks for them in full.
    """

    label: str
    log: bool = False
    base: int = 10
    low: float | None = None
    high: float | None = None
    top: float | None = None


@dataclass(frozen=True)
class Span:
    """A stretch of steps to point out, ``(after, by]``; ``mark`` is the short word inside the chart."""

    label: str
    mark: str
    after: int
    by: int
    tone: str


def chart(
    lines: Sequence[Line],
    left: Axis,
    right: Axis | None = None,
    *,
    title: str = "",
    marks: Mapping[str, NDArray[np.int64]] | None = None,
    spans: Sequence[Span] = (),
    across: str = "step",
    names: Sequence[str] = (),
    numbers: int = NUMBERS,
    adjustable: bool = False,
) -> dict[str, Any]:
    """Return a chart as the page's drawer ``lines`` takes it.

    ``marks`` are steps to point out, by label; ``spans`` are stretches of them; ``across`` names the
    horizontal axis, and ``names`` its places where they are no steps. With ``adjustable`` the page offers a
    logarithmic axis and smoothing.
    """
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    columns, present = [], []
    for line in lines:
        at = np.searchsorted(steps, line.steps)
        column, there = np.full(len(steps), np.nan), np.zeros(len(steps), np.bool_)
        column[at], there[at] = line.values, True
        columns.append(column)
        present.append(there)
    gaps = [_gaps(line) for line in lines]
    ends = np.unique(np.concatenate([breaks.ravel() for breaks, _, _ in gaps]))
    most = max(64, numbers // (len(lines) + 1))
    kept = keep(columns, present, most, np.flatnonzero(np.isin(steps, ends)).tolist())
    over = _over(lines, [column[kept] for column in columns], left, right)
    drawn = []
    for line, column, there, hidden, (breaks, sampled, every) in zip(
        lines, columns, present, over, gaps, strict=True
    ):
        values = column[kept]
        without = np.flatnonzero(there[kept] & ~np.isfinite(values))
        drawn.append(
            {
                "label": line.label,
                "axis": line.axis,
                "style": line.style,
                "tone": line.tone,
                "over": hidden,
                "downTo": line.down_to,
                "values": np.where(np.isfinite(values), values, np.nan),
                "odd": without[:0] if line.gaps else without,
                "gap": without if line.gaps else without[:0],
                "breaks": breaks.ravel(),
                "sampled": sampled.ravel(),
                "every": every,
            }
        )
    return {
        "title": title,
        "steps": steps[kept],
        "range": math.ceil(len(steps) / reduced_to(most, len(lines))) if len(steps) > most else 1,
        "lines": drawn,
        "left": dataclasses.asdict(left),
        "right": dataclasses.asdict(right) if right else None,
        "marks": [{"label": label, "steps": at} for label, at in (marks or {}).items() if len(at)],
        "spans": [dataclasses.asdict(span) for span in spans],
        "across": across,
        "names": list(names),
        "adjustable": adjustable,
    }


def _gaps(line: Line) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return where a line breaks, where it is a sample, and how many steps apart the samples are."""
    step_gaps_of = step_gaps(line.steps if line.recorded is None else line.recorded)
    breaks = step_gaps_of.breaks
    if len(breaks) > MAX_BREAKS:
        longest = np.argsort(breaks[:, 0] - breaks[:, 1], kind="stable")[:MAX_BREAKS]
        breaks = breaks[np.sort(longest)]
    return breaks, step_gaps_of.sampled, step_gaps_of.every


def _over(
    lines: Sequence[Line], columns: Sequence[NDArray[np.float64]], left: Axis, right: Axis | None
) -> list[int]:
    """Return how many of the lines beneath it each line would hide.

    That is those from which it is less than its width apart at most of their common steps. An area has edges,
    no line that could be hidden.
    """
    axes = {"left": left, "right": right or left}
    heights = [_heights(column, axes[line.axis]) for line, column in zip(lines, columns, strict=True)]
    over = [0] * len(lines)
    for side, axis in axes.items():
        here = [i for i, line in enumerate(lines) if line.axis == side]
        limits = () if axis.log else [limit for limit in (axis.low, axis.high) if limit is not None]
        drawn = np.concatenate([limits, *(heights[i][np.isfinite(heights[i])] for i in here)])
        width = WIDTH * float(drawn.max() - drawn.min()) if drawn.size else 0.0
        beneath = [i for i in here if lines[i].style not in {"edge", "area"}]
        for i in beneath:
            if lines[i].style == "line":
                over[i] = sum(_covers(heights[i], heights[k], width) for k in beneath if k < i)
    return over


def _heights(values: NDArray[np.float64], axis: Axis) -> NDArray[np.float64]:
    """Return where the values stand on an axis, NaN where they are not drawn."""
    drawable = np.isfinite(values) & ((values > 0) | (not axis.log))
    shown = np.where(drawable, values, np.nan)
    return np.log(shown) if axis.log else shown


def _covers(line: NDArray[np.float64], other: NDArray[np.float64], width: float) -> bool:
    both = np.isfinite(line) & np.isfinite(other)
    near = np.abs(line[both] - other[both]) <= width
    return 2 * int(np.count_nonzero(near)) > len(near)


def spans_decades(*columns: NDArray[np.float64], factor: float = 100.0) -> bool:
    """Return whether positive values spread so widely that only a logarithmic axis shows them all."""
    joined = np.concatenate([column[np.isfinite(column)] for column in columns])
    return bool(len(joined)) and bool(joined.min() > 0) and bool(joined.max() / joined.min() > factor)


def constant(*columns: NDArray[np.float64]) -> float | None:
    """Return the one value that all finite values have, None where they differ or there is none."""
    finite = np.concatenate([column[np.isfinite(column)] for column in columns])
    return float(finite[0]) if len(finite) and bool((finite == finite[0]).all()) else None


def clipped_top(steps: NDArray[np.int64], values: NDArray[np.float64], cold: Collection[int]) -> float | None:
    """Return where an axis of times ends, or None where it may show every value.

    The first steps of a process are ``cold``: they compile and load, and say nothing about the others. A few
    slow steps do not set the scale either.
    """
    finite = np.isfinite(values)
    usual = values[finite & ~np.isin(steps, list(cold))]
    if not len(usual) or not usual.max() > 0:
        return None
    top = float(usual.max())
    slow = float(np.quantile(usual, SLOW_SHARE))
    if slow > 0 and top > SLOW_FACTOR * slow:
        top = 2 * slow
    return 1.05 * top if float(values[finite].max()) > 1.05 * top else None
