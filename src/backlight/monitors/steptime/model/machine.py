"""What a run recorded of its machine: growth of the process's memory, counters of its GPU. No torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from backlight.monitors.steptime.model.evidence import DEVICE_PREFIX, HOST_MEMORY, percent
from backlight.store.read.run import Run, Scalar
from backlight.text import size

WARM_UP = 1 / 3
"""Share of the readings in which allocators and caches still fill."""

MIN_READINGS = 6
"""Readings after that, without which growth is not stated."""

QUARTERS = 4
LEAST_GROWTH = 2.0**24
LEAST_SHARE = 0.05
"""Growth after the warm-up, in bytes and as a share of the memory, below which it may be an allocator's."""

MAX_READINGS = 400
"""Readings of which all pairs are compared."""


@dataclass(frozen=True)
class MemoryGrowth:
    """Growing memory of the process: bytes at the end, and bytes a step from ``since`` to ``until``."""

    level: float
    per_step: float
    since: int
    until: int


def machine_scalar(run: Run, name: str) -> Scalar | None:
    """Return a scalar of the newest attempt, None where it was not recorded."""
    if name not in run.scalar_names("backlight"):
        return None
    scalar = run.scalar(name, attempt=run.attempts[-1].index)
    return scalar if len(scalar.steps) else None


def device_idle(run: Run) -> float | None:
    """Return the share of the time in which the device is idle, by its own counter; None if not known."""
    utilization = machine_scalar(run, f"{DEVICE_PREFIX}utilization")
    return None if utilization is None else max(0.0, 1.0 - float(np.median(utilization.values)))


def memory_growth(run: Run) -> MemoryGrowth | None:
    """Return the growth of the process's memory after the warm-up, None where it does not grow throughout.

    The slope is the median over all pairs of readings (Theil and Sen), which a freed cache does not move.
    Each quarter of the readings has to lie above the one before it.
    """
    scalar = machine_scalar(run, HOST_MEMORY)
    first = 0 if scalar is None else int(WARM_UP * len(scalar.steps))
    if scalar is None or len(scalar.steps) - first < MIN_READINGS:
        return None
    steps, values = scalar.steps[first:], scalar.values[first:]
    quarters = [float(np.median(quarter)) for quarter in np.array_split(values, QUARTERS)]
    grown = quarters[-1] - quarters[0]
    rises = all(later > earlier for earlier, later in itertools.pairwise(quarters))
    if not rises or grown < max(LEAST_GROWTH, LEAST_SHARE * quarters[-1]):
        return None
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), MAX_READINGS)).astype(int)
    x, y = steps[chosen].astype(float), values[chosen]
    i, j = np.triu_indices(len(x), 1)
    slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
    return MemoryGrowth(float(values[-1]), slope, int(steps[0]), int(steps[-1]))


def machine_words(run: Run) -> list[str]:
    """Return what the readings of the machine add to the line of facts about a step."""
    words = []
    used, hot, throttled = (
        machine_scalar(run, f"{DEVICE_PREFIX}{name}") for name in ("utilization", "temperature", "throttled")
    )
    if used is not None:
        heat = "" if hot is None else f" at {np.median(hot.values):.0f} \N{DEGREE SIGN}C"
        words.append(f"GPU {percent(float(np.median(used.values)))} busy{heat}")
    if throttled is not None and throttled.values.any():
        words.append(f"GPU clock throttled {percent(float(throttled.values.mean()))} of the time")
    growth = memory_growth(run)
    if growth is not None:
        words.append(f"memory {size(growth.level)}, {size(growth.per_step)} more each step")
    return words
