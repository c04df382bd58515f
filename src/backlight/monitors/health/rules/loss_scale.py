"""Rule ``loss_scale``: fp16 gradients overflow, so that a scaler skips steps, or underflow to zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.findings.recorded_steps import step_weights, weighted_share
from backlight.monitors.health.model.history import at_steps, finite_median
from backlight.monitors.health.model.score import skipped_steps
from backlight.records import Evidence, Finding, ParameterRecord, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import percent


@dataclass(frozen=True)
class LossScaleLimits(Limits, monitor="health"):
    """Limits of the rule ``loss_scale``."""

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
    underflow_zero_share: float = limit(0.1, "share of values of a gradient that are exactly zero", high=1.0)
    underflow_magnitude: float = limit(
        2.0**-20,
        "rms of the other values, times the loss scale: normally distributed values of which a tenth rounds "
        "to zero have four times the smallest subnormal, heavy tails four times more",
        source="IEEE 754 binary16: smallest normal number 2^-14, smallest subnormal 2^-24",
    )
    underflow_window: int = limit(20, "last recorded steps that the medians are taken over", low=1)


@rule("loss_scale", monitor="health", limits=LossScaleLimits, is_statistic=True)
def loss_scale(run: Run, limits: LossScaleLimits) -> Iterator[Finding]:
    """Find a scaler that skips steps after its search for a scale, and gradients that fp16 cannot hold."""
    yield from _skips(run, limits)
    if run.has("gradient"):
        yield from _underflow(run, limits)


def _skips(run: Run, limits: LossScaleLimits) -> Iterator[Finding]:
    """Find a scaler that is stuck at the end of the run, else one that keeps skipping."""
    scaler = run.scalar("scaler/skipped")
    steps, skipped = scaler.steps, scaler.values > 0
    misses = np.flatnonzero(~skipped)
    streak = len(steps) if len(misses) == 0 else len(steps) - 1 - int(misses[-1])
    start = calibrated(skipped, limits)
    later = skipped[start:]
    share = weighted_share(later, step_weights(steps)[start:])
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
    elif len(later) >= limits.skips_steps and share > limits.skips_share:
        places = start + np.flatnonzero(later)
        yield Finding(
            severity=Severity.WARNING,
            title=f"The gradient scaler skips {percent(share)} of the steps",
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


def calibrated(skipped: NDArray[np.bool_], limits: LossScaleLimits) -> int:
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


def _underflow(run: Run, limits: LossScaleLimits) -> Iterator[Finding]:
    """Find matrices with many zeros whose other values, under the scale, are the smallest that fp16 has.

    Zeros of other origin (a dead ReLU, tokens that did not occur) leave values of ordinary size next to
    them. fp32 parameters are evaluated only under a gradient scaler: autocast computes their gradient in
    fp16 and casts it afterwards.
    """
    scale = run.scalar("scaler/scale")
    scaled = len(scale.steps) > 0
    suspects = [record for record in run.parameters() if _suspect(record, scaled)]
    if not suspects:
        return
    norm = run.frame("gradient", "norm")
    zeros, sizes = run.frame("gradient", "zeros"), run.frame("gradient", "numel")
    scale_S = at_steps(norm.steps, scale.steps, scale.values)
    scale_S = np.where(np.isfinite(scale_S), scale_S, 1.0)
    taken_S = ~np.isin(norm.steps, list(skipped_steps(run)))
    zeros_of: dict[int, tuple[float, float, int]] = {}
    evaluated = 0
    for record in suspects:
        column = norm.names.index(record.name)
        rows = np.flatnonzero(norm.measured[:, column] & np.isfinite(norm.values[:, column]) & taken_S)
        rows = rows[-limits.underflow_window :]
        if len(rows) < limits.underflow_window:
            continue
        evaluated += 1
        others = (sizes.values[rows, column] - zeros.values[rows, column]).astype(float)
        share = float(np.median(1.0 - others / np.maximum(sizes.values[rows, column], 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            magnitude = float(finite_median(norm.values[rows, column] / np.sqrt(others) * scale_S[rows]))
        if limits.underflow_zero_share <= share < 1.0 and magnitude < limits.underflow_magnitude:
            zeros_of[column] = (share, magnitude, int(rows[-1]))
    if not zeros_of:
        return
    order = phrases.loudest(zeros_of, lambda c: zeros_of[c][0])
    worst = order[0]
    name, (share, magnitude, last) = norm.names[worst], zeros_of[worst]
    step = int(norm.steps[last])
    under = (
        f" under a loss scale of {phrases.number(float(scale_S[last]))}"
        if scaled
        else " without a loss scale"
    )
    evidence = [
        phrases.series(
            "gradient/zero_share",
            norm.names[c],
            int(norm.steps[zeros_of[c][2]]),
            float(zeros.values[zeros_of[c][2], c] / sizes.values[zeros_of[c][2], c]),
            "1",
        )
        for c in order
    ]
    evidence.append(phrases.series("gradient/norm", name, step, norm.values[last, worst]))
    if scaled:
        evidence.append(phrases.scalar("scaler/scale", step, float(scale_S[last])))
    yield Finding(
        severity=Severity.WARNING,
        title=(
            f"{phrases.gradient_of([norm.names[c] for c in order], len(zeros_of))} "
            f"underflow{'s' if len(zeros_of) == 1 else ''} in fp16"
        ),
        detail=(
            f"{percent(share)} of the values of `{name}` are exactly zero, and the rms of the "
            f"others{under} is {phrases.number(magnitude)}: fp16 rounds values below 3e-8 to zero. "
            f"Affected: {phrases.share(len(zeros_of), evaluated, 'half-precision matrices')}."
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=step),
        evidence=tuple(evidence),
        fix=(
            "Scale the loss (`torch.amp.GradScaler`; raise `init_scale` or lower `growth_interval` if there "
            "is one), or use bfloat16."
        ),
        refuted_if="the share of zeros is the same in fp32 or at a larger scale.",
    )


def _suspect(record: ParameterRecord, scaled: bool) -> bool:
    """Return whether the gradient of a parameter was computed in fp16, and is expected to have no zeros."""
    half = record.dtype == "float16" or (scaled and record.dtype == "float32")
    return half and len(record.shape) >= 2 and "Embedding" not in record.module_type
