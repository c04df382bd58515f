"""Steady step of the clocked steps, and its phases, which add up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.monitors.steptime.model.step_times import (
    MIN_STEPS,
    SeriesError,
    SteadyPart,
    Summary,
    find_steady,
    summarize,
)

SUM_TOLERANCE = 0.02
"""Share by which the phases of a step may miss the step."""

_ORDER = (
    "data", "host_to_device", "forward", "loss", "backward", "clip", "optimizer",
    "evaluation", "checkpoint", "other", "between",
)  # fmt: skip


@dataclass(frozen=True)
class PhaseTime:
    """One phase over the steady steps, in milliseconds.

    ``share`` is the median over steps of the phase's share of its step, normalised to a sum of one over
    the phases: a sum over steps would give the phase of one outlier the share of the outlier.
    """

    median_ms: float
    p95_ms: float
    mad_ms: float
    share: float


@dataclass(frozen=True)
class StepProfile:
    """The steady part of the clocked steps.

    ``step`` is its median and interval in seconds, None where no steady part was found; ``phases`` are in the
    order of a step; ``sum_error`` is the largest share by which the phases of a steady step miss it.
    """

    steady: SteadyPart
    step: Summary | None
    phases: dict[str, PhaseTime]
    sum_error: float


def summarize_steps(
    seconds: Sequence[float], phases: Sequence[dict[str, float]], separated: Sequence[bool]
) -> StepProfile:
    """Summarize the seconds of clocked steps, and of their phases with the rest of the step among them."""
    steady = find_steady(seconds)
    if len(steady.values) < MIN_STEPS:
        return StepProfile(steady, None, {}, 0.0)
    kept = phases[steady.warmup :]
    names = sorted({name for step in kept for name in step}, key=_order)
    table = np.array([[step.get(name, 0.0) for name in names] for step in kept])
    errors = np.abs(table.sum(axis=1) - steady.values) / steady.values
    worst = int(errors.argmax())
    if errors[worst] > SUM_TOLERANCE:
        raise SeriesError(
            f"the phases of step {steady.warmup + worst} add up to {table[worst].sum() * 1e3:.3f} ms, "
            f"the step took {steady.values[worst] * 1e3:.3f} ms: expected agreement within "
            f"{SUM_TOLERANCE:.0%}"
        )
    shares = np.median(table / table.sum(axis=1, keepdims=True), axis=0)
    shares /= shares.sum()
    is_separated = all(separated[steady.warmup :])
    found = {}
    for name, values, share in zip(names, table.T, shares.tolist(), strict=True):
        median = float(np.median(values))
        shown = name if is_separated or name != "other" else "between"
        found[shown] = PhaseTime(
            median * 1e3,
            float(np.quantile(values, 0.95)) * 1e3,
            float(np.median(np.abs(values - median))) * 1e3,
            share,
        )
    return StepProfile(steady, summarize(steady.values), found, float(errors[worst]))


def _order(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)
