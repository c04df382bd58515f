"""Steady step of the clocked steps, and its phases, which add up to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from backlight.monitors.steptime.model.step_times import MIN_STEPS, SeriesError, find_steady, summarize
from backlight.records import Phase

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
class StepTime:
    """One step: host seconds, those of its phases, which add up, and of its optimizers, by their number."""

    seconds: float
    phases: dict[str, float]
    separated: bool
    backwards: int = 1
    optimizers: tuple[str, ...] = ()
    optimizer_seconds: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, clocked: Mapping[str, float], seconds: float, *others: Any) -> Self:
        """Return the step whose clocked phases are given; the rest of it is ``other``."""
        phases = {str(name): spent for name, spent in clocked.items()}
        phases[Phase.OTHER] = max(0.0, seconds - sum(phases.values()))
        return cls(seconds, phases, *others)


@dataclass(frozen=True)
class OptimizerTime:
    """One of several optimizers: median milliseconds, and median share of a step, over the steady steps."""

    number: int
    type: str
    median_ms: float
    share: float


@dataclass(frozen=True)
class StepMilliseconds:
    """The steady step: median with its interval, 95th percentile, median absolute deviation."""

    median_ms: float
    low_ms: float
    high_ms: float
    p95_ms: float
    mad_ms: float
    steps: int


@dataclass(frozen=True)
class StepProfile:
    """The steady part of the clocked steps.

    ``warmup`` steps come before it, the cold first one included, and ``trouble`` is why it is not one level;
    ``step`` is None where no steady part was found; ``phases`` are in the order of a step; ``sum_error`` is
    the largest share by which the phases of a steady step miss it.
    """

    first_ms: float
    warmup: int
    trouble: str
    step: StepMilliseconds | None
    phases: dict[str, PhaseTime]
    sum_error: float


def summarize_steps(steps: Sequence[StepTime]) -> StepProfile:
    """Summarize clocked steps and their phases."""
    steady = find_steady([step.seconds for step in steps])
    if len(steady.values) < MIN_STEPS:
        return StepProfile(steady.first * 1e3, steady.warmup, steady.trouble, None, {}, 0.0)
    kept = steps[steady.warmup :]
    names = sorted({name for step in kept for name in step.phases}, key=_order)
    table = np.array([[step.phases.get(name, 0.0) for name in names] for step in kept])
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
    is_separated = all(step.separated for step in kept)
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
    whole = summarize(steady.values)
    step = StepMilliseconds(
        median_ms=1e3 * whole.median,
        low_ms=1e3 * whole.low,
        high_ms=1e3 * whole.high,
        p95_ms=1e3 * whole.p95,
        mad_ms=1e3 * whole.mad,
        steps=whole.count,
    )
    return StepProfile(steady.first * 1e3, steady.warmup, steady.trouble, step, found, float(errors[worst]))


def optimizer_times(
    steps: Sequence[StepTime], profile: StepProfile, types: Mapping[int, str]
) -> tuple[OptimizerTime, ...]:
    """Return the time of each optimizer; nothing for one alone, whose time is that of its phase."""
    if profile.step is None or len(types) < 2:
        return ()
    kept = steps[profile.warmup :]
    whole = np.array([step.seconds for step in kept])
    found = []
    for number, kind in sorted(types.items()):
        spent = np.array([step.optimizer_seconds.get(number, 0.0) for step in kept])
        found.append(
            OptimizerTime(number, kind, 1e3 * float(np.median(spent)), float(np.median(spent / whole)))
        )
    return tuple(found)


def _order(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)
