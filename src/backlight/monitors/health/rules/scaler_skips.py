"""Rule ``scaler_skips``: the gradient scaler skips more steps than the search for a scale needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class ScalerLimits(Limits, monitor="health"):
    """Limits of the rule ``scaler_skips``."""

    skips_calibration: int = limit(
        50,
        "first steps in which skipping is the search for a scale: from 2^16 it takes at most 17 skips, from "
        "2^32 33",
        source="torch.amp.GradScaler: init_scale 65536, halved at each skip",
        low=0,
    )
    skips_settled: int = limit(10, "steps in a row without a skip that end the search earlier", low=1)
    skips_share: float = limit(
        0.05,
        "share of skipped steps after the search; a sound scaler skips about one in 2000",
        source="torch.amp.GradScaler: growth_interval 2000; the factor of 100 is chosen",
        high=1.0,
    )
    skips_steps: int = limit(50, "steps after the search that the share needs", low=1)
    skips_stuck: int = limit(
        20, "skips in a row up to the end of the run: nothing is learned any more, and 2^16 is used up", low=2
    )


@rule("scaler_skips", monitor="health", limits=ScalerLimits)
def scaler_skips(run: Run, limits: ScalerLimits) -> Iterator[Finding]:
    """Find a scaler that is stuck at the end of the run, else one that keeps skipping."""
    known = run.scalar("scaler/skipped")
    steps, skipped = known.steps, known.values > 0
    misses = np.flatnonzero(~skipped)
    streak = len(steps) if len(misses) == 0 else len(steps) - 1 - int(misses[-1])
    start = calibrated(skipped, limits)
    later = skipped[start:]
    scale = run.scalar("scaler/scale")
    if streak >= limits.skips_stuck:
        begin = int(steps[len(steps) - streak])
        yield Finding(
            severity=Severity.ERROR,
            title=f"The gradient scaler has skipped every step since step {begin}",
            detail=(
                f"Each of the last {streak} recorded steps was skipped: the weights are no longer "
                f"updated{_scale_words(scale.values)}."
            ),
            subject=Subject(step=begin),
            evidence=_evidence(steps[len(steps) - streak :], scale.steps, scale.values),
            fix=(
                "A scale that falls at every step means that gradients are NaN or Inf at any scale: run "
                f"`backlight nan SCRIPT` up to step {begin}."
            ),
            refuted_if="a later step is taken.",
        )
    elif len(later) >= limits.skips_steps and later.mean() > limits.skips_share:
        places = start + np.flatnonzero(later)
        yield Finding(
            severity=Severity.WARNING,
            title=f"The gradient scaler skips {100 * float(later.mean()):.0f} % of the steps",
            detail=(
                f"{phrases.share(int(later.sum()), len(later), 'recorded steps')} were skipped after the "
                f"scale was calibrated (from step {int(steps[start])} on); one in 2000 is "
                f"usual{_scale_words(scale.values)}."
            ),
            subject=Subject(step=int(steps[places[0]])),
            evidence=_evidence(steps[places], scale.steps, scale.values),
            fix=(
                "Clip after `scaler.unscale_(optimizer)`, use bfloat16, or a longer `growth_interval`: the "
                "gradients repeatedly overflow fp16."
            ),
            refuted_if="growth_interval is short by design, so that each growth costs a skip.",
        )


def calibrated(skipped: NDArray[np.bool_], limits: ScalerLimits) -> int:
    """Return the row at which the search for a scale is over.

    That is the first row of ``skips_settled`` steps without a skip, at most ``skips_calibration``.
    """
    good = 0
    for row, missed in enumerate(skipped[: limits.skips_calibration]):
        good = 0 if missed else good + 1
        if good == limits.skips_settled:
            return row + 1 - good
    return min(limits.skips_calibration, len(skipped))


def _scale_words(values: NDArray[np.float64]) -> str:
    if len(values) == 0:
        return ""
    return f"; the scale changed from {phrases.number(values[0])} to {phrases.number(values[-1])}"


def _evidence(
    steps: NDArray[np.int64], scale_steps: NDArray[np.int64], scales: NDArray[np.float64]
) -> tuple[Evidence, ...]:
    shown = [phrases.scalar("scaler/skipped", int(step), 1.0) for step in steps[: phrases.EVIDENCE_ROWS]]
    place = np.flatnonzero(scale_steps == steps[-1])
    if len(place):
        shown.append(phrases.scalar("scaler/scale", int(steps[-1]), scales[place[0]]))
    return tuple(shown)
