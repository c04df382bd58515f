"""What a value is compared with: causal running medians, conditions that last, and leaps as training goes on.

S rows are recorded steps in order, P columns are parameters. History of a row is what lies before it;
a value that is not finite never enters a history.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backlight.findings.limits import Limits, limit, merge_overrides, with_overrides
from backlight.findings.recorded_steps import WORDS

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


# Leaps out of the recent past, one value at a time: what the rule ``spike`` finds, as training goes on.


@dataclass(frozen=True)
class LeapLimits(StretchLimits):
    """Limits of a leap of the total norm or the loss."""

    spike_window: int = limit(
        64, "recorded steps of history that a value is compared with; short, since losses trend", low=8
    )
    spike_minimum: int = limit(
        30, "finite values of history needed; the first steps of a run are steep", low=4
    )
    spike_deviations: float = limit(
        10.0,
        "robust standard deviations (1.4826 times the median absolute deviation) above the median; gradient "
        "noise has heavy tails, so that the 3 of a normal distribution would cry daily",
        source="Hampel 1974 for median and MAD; the factor is chosen",
        low=1.0,
    )
    spike_norm_ratio: float = limit(
        5.0,
        "a total norm must also exceed this many times its median: a smooth run has a MAD near 0, and "
        "recurrent nets leap by 4 in good health",
        low=1.0,
    )
    spike_loss_ratio: float = limit(
        1.5, "a loss must also exceed its median by this factor, for the same reason", low=1.0
    )


def live_limits(thresholds: Mapping[str, Mapping[str, float]]) -> LeapLimits:
    """Return the limits with the thresholds of the run, which the rule is evaluated with as well."""
    return with_overrides(LeapLimits, merge_overrides("health", overrides=thresholds.get("health")))


@dataclass
class LiveLeaps:
    """Norms and losses of the last steps of the same optimizers."""

    limits: LeapLimits
    _first: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._since, self._bound = 0, 0.0
        self._works, self._norms, self._losses = (
            deque[float](maxlen=self.limits.spike_window) for _ in range(3)
        )

    def add(self, norm: float | None, loss: float | None, counts: Mapping[str, float]) -> dict[str, float]:
        """Add a step, and return the median before it of each of ``norm`` and ``loss`` that leaps.

        As in the rule: above the median by a factor, and by robust standard deviations of the logarithms,
        once it is divided by what the step did more than those before it. ``counts`` holds those of
        :data:`backlight.findings.recorded_steps.WORDS`, relative to their first values instead of the medians
        of the run, which are not known yet. A history with values below 0 has no size to leap from.
        """
        work = 0.0
        for name in WORDS:
            count = counts.get(name)
            if count:
                share = count / self._first.setdefault(name, count)
                work = share if share > work else work
        work, works = work or 1.0, sorted(self._works)
        middle = len(works) // 2
        usual_work = (works[middle] + works[~middle]) / 2 if works else work
        self._works.append(work)
        more = work / usual_work if work > usual_work else 1.0
        leaping = {}
        for name, value, past, ratio in (
            ("norm", norm, self._norms, self.limits.spike_norm_ratio),
            ("loss", loss, self._losses, self.limits.spike_loss_ratio),
        ):
            usual = None if value is None else self._usual_of_leap(past, value / more, ratio)
            if usual is not None:
                leaping[name] = usual
            if value is not None:
                past.append(value)
        return leaping

    def leaps(self, loss: float) -> bool:
        """Add the loss of a step of which nothing else is known, and return whether it leaps."""
        self._since += 1
        if self._since > self.limits.spike_window // 4:
            self._since = 0
            self._bound = 0.0 if not self._losses else statistics.median(self._losses)
        # Sorting the history costs more than all else, and most losses are near the median of a while ago.
        is_high = not loss <= self._bound * (1 + self.limits.spike_loss_ratio) / 2
        usual = self._usual_of_leap(self._losses, loss, self.limits.spike_loss_ratio) if is_high else None
        self._losses.append(loss)
        return usual is not None

    def _usual_of_leap(self, past: deque[float], value: float, ratio: float) -> float | None:
        sizes = sorted([size for size in past if -math.inf < size < math.inf])
        count = len(sizes)
        if not count or sizes[0] < 0:
            return None
        if sizes[0] == 0:
            sizes = [size for size in sizes if size > 0]
            count = len(sizes)
        # Most values end here, without a logarithm: the median of these is no lower.
        if count < self.limits.spike_minimum or not ratio * sizes[(count - 1) // 2] < value:
            return None
        logs = [math.log(size) for size in sizes]
        middle = statistics.median(logs)
        usual = math.exp(middle)
        if not ratio * usual < value < math.inf:  # NaN included
            return None
        deviation = MAD_TO_DEVIATION * statistics.median(abs(log - middle) for log in logs)
        return usual if math.log(value) - middle > self.limits.spike_deviations * deviation else None
