"""Single numbers of an analysis that a rule can judge; pure functions, nothing is decided here."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from backlight.trace.analysis import RankAnalysis
from backlight.trace.idle import Idle
from backlight.trace.ranks import Ranks


def idle_share(analysis: RankAnalysis) -> float | None:
    """Return the median over steps of the part in which the device stands still; None without a device.

    With :func:`idle_causes` this is what "launch-bound" and "data-bound" rest on.
    """
    shares = [
        row.idle.total / row.duration for row in analysis.steps if row.device is not None and row.duration
    ]
    return float(np.median(shares)) if shares else None


def idle_causes(analysis: RankAnalysis) -> dict[str, float]:
    """Return the parts of the idle time by cause, which add up to 1; empty where nothing was idle."""
    total = sum(row.idle.total for row in analysis.steps)
    if not total:
        return {}
    return {f.name: sum(getattr(row.idle, f.name) for row in analysis.steps) / total for f in fields(Idle)}


def exposed_communication(analysis: RankAnalysis) -> float | None:
    """Return the median over steps of the part with communication and no computation.

    None where no step communicates: that is not the same as fully hidden.
    """
    if not any(row.overlap.communication for row in analysis.steps):
        return None
    return float(np.median([row.overlap.exposed / row.duration for row in analysis.steps if row.duration]))


def straggler(ranks: Ranks) -> tuple[int, float, int] | None:
    """Return the rank that most often comes last, its delay and in how many steps it did.

    The delay is the median, over the steps where it came last, of the time by which the median of the
    others waited longer in collectives, as a part of the step. None without common collectives.
    """
    if not ranks.steps:
        return None
    last = [step.last for step in ranks.steps]
    rank = max(sorted(set(last)), key=last.count)
    own = [step.delay / max(step.duration[rank], 1) for step in ranks.steps if step.last == rank]
    return rank, float(np.median(own)), len(own)


def copy_share(analysis: RankAnalysis) -> float:
    """Return the part of the busy time (of the host where there is no device) that copies and casts take.

    The lines that cause them are in ``analysis.copies``, the most expensive first.
    """
    return sum(row.share for row in analysis.kinds if row.kind in {"copy and cast", "host copy"})
