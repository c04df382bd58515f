"""Host time that a run spent in backlight, at its start, at its end and in its steps; writes it repeated."""

from __future__ import annotations

import math

import numpy as np

from backlight.report.source import Source
from backlight.store.format.schema import COST, REPEATED_WRITES
from backlight.store.read.run import Run
from backlight.text import count, duration, percent, visible


def describe_cost(source: Source) -> str:
    """Return the parts that are known, as ``310 ms at the start, 90 ms at the end, …``."""
    parts = [f"{duration(seconds)} at the {part}" for part, seconds in _fixed(source.run).items()]
    spent, clock = source.scalar("cost"), source.scalar("time")
    if len(spent.steps):
        parts.append(f"{duration(float(np.nanmedian(spent.values)))} per recorded step (median)")
        if len(clock.steps) > 1 and (elapsed := float(clock.values[-1] - clock.values[0])) > 0:
            within = (spent.steps > clock.steps[0]) & (spent.steps <= clock.steps[-1])
            share = percent(float(np.nansum(spent.values[within])) / elapsed)
            parts.append(f"{share} of the time between the first step and the last")
    if repeated := source.run.events(REPEATED_WRITES):
        writes = count(sum(int(event.payload.get("writes", 0)) for event in repeated), "write")
        parts.append(
            f"{writes} failed and succeeded later (last: {visible(repeated[-1].payload.get('reason'))})"
        )
    return ", ".join(parts)


def _fixed(run: Run) -> dict[str, float]:
    """Return the seconds of start and end on the lowest rank of the newest attempt that recorded them."""
    events = run.events(COST)
    newest = max((event.attempt for event in events), default=0)
    rank = min((event.rank for event in events if event.attempt == newest), default=0)
    payloads = [event.payload for event in events if (event.attempt, event.rank) == (newest, rank)]
    fixed: dict[str, float] = {}
    for part in ("start", "end"):
        seconds = [payload.get("seconds") for payload in payloads if payload.get("part") == part]
        finite = [float(s) for s in seconds if isinstance(s, int | float) and math.isfinite(s)]
        if finite:
            fixed[part] = sum(finite)
    return fixed
