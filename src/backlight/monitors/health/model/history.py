"""What a value is compared with: causal running medians, and conditions that last.

S rows are recorded steps in order, P columns are parameters. History of a row is what lies before it;
a value that is not finite never enters a history.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings.limits import Limits, limit

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]

Marks = Callable[[slice, Integers], tuple[Bools, Bools]]
"""Hits and what was measured, at a stretch of rows and for some columns."""

TAIL = 4
"""Windows at the end of a run that are looked at first: few columns need what lies before them."""

CHUNK = 512
"""Rows whose histories are laid out at once."""

MAD_TO_DEVIATION = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""


def finite_median(values: Floats, minimum: int = 1) -> Floats:
    """Return the median of the finite values along the last axis; NaN where fewer than ``minimum``."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=-1)  # NaN sorts last
    count = np.sum(~np.isnan(ordered), axis=-1)
    if ordered.shape[-1] == 0:
        return np.full(count.shape, np.nan)
    low = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0)[..., None], -1)[..., 0]
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[-1] - 1)[..., None], -1)[..., 0]
    return np.where(count >= max(minimum, 1), low + (high - low) / 2, np.nan)


def _constant(steps: int, refresh: int) -> list[tuple[int, int]]:
    """Return the stretches of rows within which a running median holds."""
    rows = [*range(min(refresh, steps)), *range(refresh, steps, refresh)]
    return list(zip(rows, [*rows[1:], steps], strict=True)) if rows else []


def medians_outrun(
    values_SP: Floats, window: int, refresh: int, minimum: int, factor: float
) -> tuple[Integers, Floats]:
    """Compute the running medians that a value may exceed ``factor`` times, and no others.

    A running median is that of the ``window`` rows before a row, NaN where fewer than ``minimum`` of them are
    finite. It is computed anew at every row below ``refresh`` and at every ``refresh``-th row after it, and
    holds in between. A median that is not 0 is at least half the least positive value of its history. So
    where no value of a stretch exceeds ``factor`` times that, none exceeds as much of the median, which is
    then not computed.

    Returns
    -------
    The columns that may hold such a value, in order, of shape [C], and their running medians, of shape
    [S, C]: NaN where no value of the stretch is as large. Values are NaN where not measured, never negative.
    """
    stretches_B = _constant(len(values_SP), refresh)
    begins = [row for row, _ in stretches_B]
    lows_BP = np.full((len(begins), values_SP.shape[1]), np.inf)
    outrun: list[Integers] = []
    for b, (row, following) in enumerate(stretches_B):
        part = values_SP[row:following]
        low_P = lows_BP[bisect.bisect_right(begins, row - window) - 1 if row > window else 0 : b]
        with np.errstate(invalid="ignore", over="ignore"):
            lows_BP[b] = np.where(part > 0, part, np.inf).min(axis=0)
            bound_P = factor * (low_P.min(axis=0, initial=np.inf) / 2)
            outrun.append(np.flatnonzero(np.fmax.reduce(part, axis=0) > bound_P))
    columns = np.unique(np.concatenate(outrun)) if outrun else np.zeros(0, dtype=np.int64)
    medians_SC = np.full((len(values_SP), len(columns)), np.nan)
    for (row, following), mine in zip(stretches_B, outrun, strict=True):
        if len(mine):
            history = np.ascontiguousarray(values_SP[max(0, row - window) : row, mine].T)
            medians_SC[row:following, np.searchsorted(columns, mine)] = finite_median(history, minimum)
    return columns, medians_SC


def median_and_deviation(history: Floats, minimum: int = 1) -> tuple[Floats, Floats]:
    """Return median and robust standard deviation (from the MAD) along the last axis; NaN where too few."""
    median = finite_median(history, minimum)
    return median, MAD_TO_DEVIATION * finite_median(np.abs(history - median[..., None]), minimum)


def histories(values_S: Floats, window: int) -> Iterator[tuple[slice, Floats]]:
    """Yield stretches of rows with the ``window`` values before each of their rows, NaN before the first."""
    padded = np.concatenate([np.full(window, np.nan), values_S])
    for start in range(0, len(values_S), CHUNK):
        stop = min(start + CHUNK, len(values_S))
        block = padded[start : stop - 1 + window]
        yield slice(start, stop), np.lib.stride_tricks.sliding_window_view(block, window)


def more_than_before(values_S: Floats, window: int) -> Floats:
    """Return how many times a positive value is the median of the ``window`` before it; at least 1."""
    more_S = np.ones(len(values_S))
    if len(values_S) and values_S.min() < values_S.max():
        for rows, before in histories(values_S, window):
            more_S[rows] = np.fmax(1.0, values_S[rows] / finite_median(before))
    return more_S


def present(values_SP: Floats, measured_SP: Bools) -> Floats:
    """Return values that are NaN where nothing was measured; not a copy where everything was."""
    return values_SP if measured_SP.all() else np.where(measured_SP, values_SP, np.nan)


def ending(measured_SP: Bools, window: int) -> int:
    """Return a row from which on each column has its last ``window`` measured rows, or all that it has."""
    steps = len(measured_SP)
    size = window
    while size < steps:
        start = steps - size
        lacking = np.flatnonzero(np.sum(measured_SP[start:], axis=0) < window)
        if not measured_SP[:start, lacking].any():
            return start
        size *= TAIL
    return 0


def ending_share(hits_SP: Bools, measured_SP: Bools, window: int) -> Floats:
    """Return the share of hits among the last ``window`` measured rows of each column, of shape [P].

    NaN where a column was measured at fewer rows than that.
    """
    shares_P = np.full(hits_SP.shape[1], np.nan)
    for column in range(hits_SP.shape[1]):
        rows = np.flatnonzero(measured_SP[:, column])
        if len(rows) >= window:
            shares_P[column] = hits_SP[rows[-window:], column].mean()
    return shares_P


def ending_streak(hits_SP: Bools, measured_SP: Bools) -> Integers:
    """Count, per column, the hits in a row up to its last measured row; of shape [P]."""
    steps = len(hits_SP)
    if steps == 0:
        return np.zeros(hits_SP.shape[1], dtype=np.int64)
    misses_SP = measured_SP & ~hits_SP
    after_P = np.where(misses_SP.any(axis=0), steps - np.argmax(misses_SP[::-1], axis=0), 0)
    after_SP = np.arange(steps)[:, None] >= after_P
    return np.asarray(np.sum(measured_SP & after_SP, axis=0, dtype=np.int64))


def ending_streaks(marks: Marks, steps: int, columns: int, window: int) -> tuple[Integers, Bools]:
    """Return :func:`ending_streak` and whether a column was measured at all, each of shape [P].

    ``marks`` is asked for the last rows first, and for those before only where a column has no miss there.
    """
    start = max(0, steps - TAIL * window)
    hits_TP, measured_TP = marks(slice(start, steps), np.arange(columns))
    lengths_P, ever_P = ending_streak(hits_TP, measured_TP), np.asarray(measured_TP.any(axis=0))
    open_O = np.flatnonzero(~(measured_TP & ~hits_TP).any(axis=0))
    if start and len(open_O):
        hits_SO, measured_SO = marks(slice(0, steps), open_O)
        lengths_P[open_O], ever_P[open_O] = ending_streak(hits_SO, measured_SO), measured_SO.any(axis=0)
    return lengths_P, ever_P


def ending_median(values_SP: Floats, measured_SP: Bools, window: int) -> Floats:
    """Return the median of the finite ones among the last ``window`` measured rows, of shape [P]."""
    medians_P = np.full(values_SP.shape[1], np.nan)
    for column in range(values_SP.shape[1]):
        medians_P[column] = finite_median(values_SP[measured_SP[:, column], column][-window:])
    return medians_P


@dataclass(frozen=True)
class StretchLimits(Limits, monitor="health"):
    """Limits of one stretch of steps."""

    spike_gap: int = limit(5, "recorded steps between two outliers that still belong to one spike", low=1)


def stretches(rows: NDArray[np.int64], gap: int) -> list[NDArray[np.int64]]:
    """Split sorted row numbers into stretches whose neighbours lie at most ``gap`` rows apart."""
    if len(rows) == 0:
        return []
    return np.split(rows, np.flatnonzero(np.diff(rows) > gap) + 1)


def at_steps(
    steps_S: NDArray[np.int64], known_K: NDArray[np.int64], values_K: Floats, missing: float = np.nan
) -> Floats:
    """Return the value that was recorded at each of ``steps_S``, ``missing`` where none was."""
    found_S = np.full(len(steps_S), missing)
    if len(known_K) == 0:
        return found_S
    places_S = np.minimum(np.searchsorted(known_K, steps_S), len(known_K) - 1)
    same_S = known_K[places_S] == steps_S
    found_S[same_S] = values_K[places_S[same_S]]
    return found_S
