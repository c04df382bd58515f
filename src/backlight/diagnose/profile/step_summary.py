"""What the steps of a profile say: the steady step, its phases, which add up, and its throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.monitors.steptime.model.step_times import (
    SeriesError,
    SteadyPart,
    Summary,
    find_steady,
    summarize,
)

SUM_TOLERANCE = 0.02
"""Share by which the phases of a step may miss the step."""


@dataclass(frozen=True)
class PhaseTime:
    """One phase over the steady steps, in milliseconds.

    ``share`` is the median over steps of the phase's share of its step, made to add up to one over
    the phases: a sum over steps would give the phase of one outlier the share of the outlier.
    """

    name: str
    median_ms: float
    p95_ms: float
    mad_ms: float
    share: float


@dataclass(frozen=True)
class StepProfile:
    """The steady part of the steps that were clocked.

    Attributes
    ----------
    steady:
        The series without its warm-up.
    step:
        Median and interval in seconds; None where no steady part was found.
    phases:
        In the order of a step.
    sum_error:
        Largest share by which the phases of a steady step miss it.
    separated:
        Whether forward and loss were told apart from what lies between the phases.
    """

    steady: SteadyPart
    step: Summary | None
    phases: tuple[PhaseTime, ...]
    sum_error: float
    separated: bool


_ORDER = (
    "data", "host_to_device", "forward", "loss", "backward", "clip", "optimizer",
    "evaluation", "checkpoint", "other", "between",
)  # fmt: skip


def summarize_steps(
    seconds: Sequence[float], phases: Sequence[dict[str, float]], separated: Sequence[bool]
) -> StepProfile:
    """Summarize clocked steps.

    Parameters
    ----------
    seconds:
        Time of each step, [steps].
    phases:
        Seconds by phase of each step, the rest of the step among them.
    separated:
        Whether each step had its forward told apart.

    Raises
    ------
    SeriesError
        If there is no step, or a time is none; if phases miss their step by more than 2 %.
    """
    steady = find_steady(seconds)
    if len(steady.values) < 4:
        return StepProfile(steady, None, (), 0.0, False)
    kept = phases[steady.warmup :]
    told = all(separated[steady.warmup :])
    names = sorted({name for step in kept for name in step}, key=_place)
    table = np.array([[step.get(name, 0.0) for name in names] for step in kept])
    errors = np.abs(table.sum(axis=1) - steady.values) / steady.values
    worst = float(errors.max())
    if worst > SUM_TOLERANCE:
        step = steady.warmup + int(errors.argmax())
        raise SeriesError(
            f"the phases of step {step} add up to {table[step - steady.warmup].sum() * 1e3:.3f} ms, "
            f"the step took {seconds[step] * 1e3:.3f} ms: expected agreement within {SUM_TOLERANCE:.0%}"
        )
    shares = np.median(table / table.sum(axis=1, keepdims=True), axis=0)
    shares /= shares.sum()
    rows = []
    for column, name in enumerate(names):
        values = table[:, column]
        median = float(np.median(values))
        rows.append(
            PhaseTime(
                name if told or name != "other" else "between",
                median * 1e3,
                float(np.quantile(values, 0.95)) * 1e3,
                float(np.median(np.abs(values - median))) * 1e3,
                float(shares[column]),
            )
        )
    return StepProfile(steady, summarize(steady.values), tuple(rows), worst, told)


def _place(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)
