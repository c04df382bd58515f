"""What is kept of old scalars of every step: mean, minimum, maximum and number of each bin of steps.

The mean stays under the id of the scalar, at the first step of the bin; the others have ids of their own.
A value that is not finite stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.format.scalar_codec import LoggedValues

WHOLE_STEPS = 100_000
"""Newest steps of a file that always stay as they are; what is older is thinned at twice so many."""

MOST_BINS = 50_000
"""Bins of one scalar, at most."""

SOURCES = ("minimum", "maximum", "number")
"""Sources by which a reader gets what belongs to the means: least and greatest value, and how many."""

BY_SOURCE = 1 << 32
"""What the id of a scalar grows by from one of the sources to the next."""

_KEPT = 1 + len(SOURCES)
"""Values that a bin takes; one of fewer stays as it is, so that thinned values never take more room."""


def bin_width(steps: int) -> int:
    """Return the steps of a bin, a power of two, by which ``steps`` make at most :data:`MOST_BINS` bins."""
    width = _KEPT
    while steps > width * MOST_BINS:
        width *= 2
    return width


def thin(logged: LoggedValues, scalars: Collection[int], width: int) -> LoggedValues:
    """Return the values, those of ``scalars`` (ids of names) by bins of ``width`` steps, others unchanged.

    Values that were thinned before, by a divisor of ``width``, are thinned further, their means by number.
    """
    is_thinned = np.isin(logged.names % BY_SOURCE, list(scalars))
    parts = [_where(logged, ~is_thinned)]
    for scalar in scalars:
        parts += _thinned(logged, scalar, width)
    joined = LoggedValues.join(parts)
    return _where(joined, np.argsort(joined.steps, kind="stable"))


def _where(logged: LoggedValues, at: npt.NDArray[Any]) -> LoggedValues:
    return LoggedValues(logged.names[at], logged.steps[at], logged.values[at])


def _thinned(logged: LoggedValues, scalar: int, width: int) -> list[LoggedValues]:
    here = logged.names == scalar
    # Of a step that was logged twice the last value counts.
    steps, at = np.unique(logged.steps[here][::-1], return_index=True)
    means = logged.values[here][::-1][at]
    if not len(steps):
        return []
    columns = [means, means.copy(), means.copy(), np.ones(len(steps))]
    for kind in range(1, _KEPT):
        belongs = logged.names == scalar + kind * BY_SOURCE
        columns[kind][np.searchsorted(steps, logged.steps[belongs])] = logged.values[belongs]
    means, lowest, highest, numbers = columns
    finite = np.isfinite(means)
    parts = _rows(scalar, 0, steps[~finite], means[~finite])
    steps, means, lowest, highest, numbers = (
        column[finite] for column in (steps, means, lowest, highest, numbers)
    )
    if not len(steps):
        return parts
    first = np.flatnonzero(np.diff(steps // width, prepend=-1))
    sizes = np.diff(first, append=len(steps))
    totals = np.add.reduceat(numbers, first)
    # Scaled by the share of each, so that the sum of large values stays finite.
    sums = np.add.reduceat(means * (numbers / np.repeat(totals, sizes)), first)
    is_binned = totals >= _KEPT
    stays = np.repeat(~is_binned, sizes)
    parts += _rows(scalar, 0, steps[stays], means[stays])
    binned = (
        sums, np.minimum.reduceat(lowest, first), np.maximum.reduceat(highest, first), totals,
    )  # fmt: skip
    for kind, values in enumerate(binned):
        parts += _rows(scalar, kind, steps[first][is_binned], values[is_binned])
    return parts


def _rows(
    scalar: int, kind: int, steps: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> list[LoggedValues]:
    return [LoggedValues(np.full(len(steps), scalar + kind * BY_SOURCE), steps, values.astype(float))]
