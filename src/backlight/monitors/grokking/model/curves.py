"""Logged accuracies over steps: sorted, gaps not filled, filler zeros marked; and their change points.

What was not logged is missing and stays missing. Shape: S logs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]

LAST_LOGS = 3
"""Logs that an accuracy must hold at the end of a run that logged ever more rarely."""

LAST_FACTOR = 1.5
"""Multiple of the step at which the accuracy was reached that those logs must last."""

WILSON_Z = 1.959963984540054
"""Normal quantile of a two-sided 95 % interval."""


class DetectionError(ValueError):
    """Accuracies that allow no verdict; the message gives the problem and the way out."""


@dataclass(frozen=True)
class Curve:
    """Finite values ``[S]`` at strictly increasing ``steps`` ``[S]``; ``notes`` name what was left out."""

    steps: Steps
    values: Values
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def between(self, after: int, before: int) -> Curve:
        """Return the logs with ``after < step < before``."""
        inside = (self.steps > after) & (self.steps < before)
        return Curve(self.steps[inside], self.values[inside], self.notes)

    def without(self, doubted: NDArray[np.bool_]) -> Curve:
        """Return the curve without the logs that ``doubted`` ``[S]`` marks."""
        return Curve(self.steps[~doubted], self.values[~doubted], self.notes)


@dataclass(frozen=True, slots=True)
class StepInterval:
    """A time bounded by two logs: later than step ``after``, at step ``by`` at the latest."""

    after: int
    by: int

    def __str__(self) -> str:
        return f"({self.after}, {self.by}]"


def read_curve(steps: ArrayLike, values: ArrayLike, name: str) -> Curve:
    """Return a logged accuracy, sorted by step.

    NaN is a log without a measurement and is left out. Of two logs of one step the later one in the
    arrays counts. ``notes`` mention both. Arrays are [S], in any order; ``name`` is the curve's in messages.

    Raises
    ------
    DetectionError
        If the shapes differ, or a value is not a share: infinite, negative, or above 1 (a percentage).
    """
    at, logged = np.asarray(steps), np.asarray(values, dtype=np.float64)
    if at.ndim != 1 or at.shape != logged.shape:
        raise DetectionError(
            f"{name}: got steps of shape {at.shape} and values of shape {logged.shape}; "
            "expected two arrays of one length"
        )
    if at.size and not np.all(np.isfinite(at.astype(np.float64))):
        raise DetectionError(f"{name}: a step is not a finite number; expected whole numbers")
    notes = []
    missing = np.isnan(logged)
    if missing.any():
        notes.append(f"{name}: {int(missing.sum())} of {len(logged)} logs are NaN and count as not logged")
    order = np.argsort(at[~missing], kind="stable")
    sorted_steps, sorted_values = at[~missing][order].astype(np.int64), logged[~missing][order]
    impossible = (sorted_values < 0) | (sorted_values > 1 + 1e-9)  # inf is above 1
    if impossible.any():
        row = int(np.argmax(impossible))
        raise DetectionError(
            f"{name}: {sorted_values[row]:g} at step {sorted_steps[row]} is not a share of samples; expected "
            "0 to 1. Log accuracies as shares, not as percentages"
        )
    last_of_step = np.append(np.diff(sorted_steps) > 0, True) if len(sorted_steps) else np.empty(0, bool)
    if not last_of_step.all():
        amount = int((~last_of_step).sum())
        notes.append(f"{name}: {amount} steps were logged more than once; the last log of a step counts")
    if not np.array_equal(at[~missing], np.sort(at[~missing])):
        notes.append(f"{name}: the logs were not in the order of their steps and were sorted")
    return Curve(sorted_steps[last_of_step], sorted_values[last_of_step], tuple(notes))


def first_stay(curve: Curve, level: float, logs: int) -> StepInterval | None:
    """Return when ``curve`` first reaches ``level`` and holds it; None if it never does.

    To hold is to be at least ``level`` at ``logs`` logs in a row. Where logs are spaced logarithmically so
    many may take a decade: three logs to the end of the run that last half as many steps again are enough.
    """
    reached = curve.values >= level
    if len(reached) < logs:
        return None
    rows = np.flatnonzero(np.convolve(reached.astype(np.int64), np.ones(logs, np.int64), "valid") == logs)
    last = ends_above(curve, level)
    if len(rows):
        row = int(rows[0])
    elif last >= LAST_LOGS and curve.steps[-1] >= LAST_FACTOR * max(1, curve.steps[-last]):
        row = len(reached) - last
    else:
        return None
    # Before the first log only the start of training at step 0 is known.
    before = int(curve.steps[row - 1]) if row else min(0, int(curve.steps[0]))
    return StepInterval(before, int(curve.steps[row]))


def ends_above(curve: Curve, level: float) -> int:
    """Return the number of logs at the end that are at least ``level`` without interruption."""
    misses = np.flatnonzero(curve.values < level)
    return len(curve) if not len(misses) else len(curve) - 1 - int(misses[-1])


def plateau(curve: Curve, logs: int) -> float:
    """Return the highest running median over ``logs`` logs: a sustained level, not a peak."""
    if not len(curve):
        return math.nan
    return float(running_median(curve, logs).max())


def running_median(curve: Curve, logs: int) -> Values:
    """Return the median of each ``logs`` logs in a row, ``[S - logs + 1]``; of all if there are fewer."""
    width = min(logs, len(curve))
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(curve.values, width), axis=1))


def level_in(curve: Curve, start: float, stop: float, logs: int) -> float:
    """Return the median over steps ``start`` to ``stop``, of fewer than ``logs`` logs the middle's value."""
    inside = curve.values[(curve.steps >= start) & (curve.steps <= stop)]
    if len(inside) >= logs:
        return float(np.median(inside))
    return float(np.interp((start + stop) / 2, curve.steps, curve.values))


def ending(curve: Curve, share: float, logs: int) -> Values:
    """Return the values of the last ``share`` of the logs, at least ``logs`` of them."""
    return curve.values[-max(logs, math.ceil(share * len(curve))) :]


def wilson(share: float, size: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``size`` samples (Wilson 1927).

    ``share * size`` need not be an integer, which ``scipy.stats`` would require.
    """
    z2 = WILSON_Z**2
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = WILSON_Z / (1 + z2 / size) * math.sqrt(share * (1 - share) / size + z2 / (4 * size**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def doubted_zeros(curve: Curve, logs: int, *, plausible: bool, low: float = 0.0) -> NDArray[np.bool_]:
    """Return a mask ``[S]`` of the logs whose accuracy of exactly 0 looks like a filler for a missing value.

    A stretch of ``logs`` zeros is doubted unless zero hits are likely (``plausible``) or a value next to it
    is at most ``low``: a net that memorises may fall below chance, but gradually, and an untrained one, at
    the first log, is at chance. A stretch of any length between two values of at least a quarter is doubted,
    since no net falls to 0 and leaves it at once; where there are two such falls, every zero is.
    """
    zero = curve.values == 0
    doubted = np.zeros(len(curve), np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], zero, [False]]).astype(np.int8)))
    falls = 0
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        neighbours = [float(curve.values[row]) for row in (start - 1, stop) if 0 <= row < len(curve)]
        fell = len(neighbours) == 2 and min(neighbours) >= 0.25
        falls += fell
        gradual = start > 0 and max(neighbours) <= low
        if fell or (stop - start >= logs and not plausible and not gradual):
            doubted[start:stop] = True
    return zero if falls >= 2 else doubted


MAX_LOGS = 1000
"""Most logs that are searched; a longer curve is thinned evenly."""

MIN_LOGS = 10
"""Fewest logs of a curve with a change point."""

PENALTY = 6.0
"""Weight of one more change, in log(n) noise variances; Schwarz's criterion has 2 for two parameters."""


def change_points(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[int, ...] | None:
    """Return the first step after each change of level, by PELT (Killick et al. 2012).

    A change point is not a verdict: a slow rise has several. ``steps`` and ``values`` are sorted, ``[S]``;
    values that are not finite are left out. None if the optional package ``ruptures`` is not installed.
    """
    try:
        import ruptures  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError:
        return None
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) < MIN_LOGS or np.ptp(values) == 0:
        return ()
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), MAX_LOGS)).round().astype(np.int64))
    steps, values = steps[kept], values[kept]
    # The median absolute difference of white noise is .954 of its standard deviation.
    noise = float(np.median(np.abs(np.diff(values)))) / 0.954
    scale = max(noise, 1e-2 * float(np.ptp(values)))
    search = ruptures.Pelt(model="l2", min_size=3, jump=1).fit(values[:, None] / scale)
    ends = search.predict(pen=PENALTY * math.log(len(values)))
    return tuple(int(steps[end]) for end in ends[:-1])
