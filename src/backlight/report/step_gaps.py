"""Steps between recorded ones: where a line must not be drawn through, and where a series is a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
