"""Rule ``always_clipped``: clipping is active at nearly every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.findings.phrases import scale_free_kinds
from backlight.findings.recorded_steps import after_share, step_weights, weighted_median, weighted_share
from backlight.monitors.health.model.history import Floats, Integers
from backlight.monitors.health.model.score import clip_factors
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, listed, percent


@dataclass(frozen=True)
class ClippedLimits(Limits, monitor="health"):
    """Limits of the rule ``always_clipped``."""

    clipped_share: float = limit(0.95, "share of the settled steps at which clipping was active", high=1.0)
    clipped_steps: int = limit(50, "settled steps that the rule needs", low=1)
    clipped_settle: float = limit(
        0.2, "first share of the run that is left out: early gradients are large", high=0.9
    )
    clipped_hard: float = limit(
        0.05,
        "median factor below which it is a warning, unless every optimizer divides by the size of the "
        "gradient: a step is then shortened more than twentyfold; language models with SGD have about 0.08",
        source="docs/formulas.md, section 1",
        high=1.0,
    )


@rule(
    "always_clipped", monitor="health", limits=ClippedLimits, is_statistic=True,
    explained_by=("gradients_not_cleared", "mixed_precision"),
)  # fmt: skip
def always_clipped(run: Run, limits: ClippedLimits) -> Iterator[Finding]:
    """Find clipping that is active at nearly all steps after the first part of a run.

    A mild factor is a hint. A hard one means that clip norm and gradients do not belong together, unless the
    optimizer divides by the size of the gradient.
    """
    steps, values = clip_factors(run)
    settled = after_share(steps, limits.clipped_settle)
    steps, values = steps[settled:], values[settled:]
    if len(steps) < limits.clipped_steps:
        return
    active, weights = values < 1.0, step_weights(steps)
    share, median = weighted_share(active, weights), weighted_median(values, weights)
    if share < limits.clipped_share:
        return
    if not median:
        yield _zeroed(run, steps, values)
        return
    scale_free = scale_free_kinds(run)
    hard = median < limits.clipped_hard and not scale_free
    middle = int(np.argmin(np.abs(values - median)))
    step, evidence = int(steps[middle]), []
    for name, unit in (("factor", "1"), ("norm", "gradient"), ("limit", "gradient")):
        other = run.scalar(f"clip/{name}")
        place = int(np.searchsorted(other.steps, step, "right")) - 1
        if place >= 0 and (name == "limit" or other.steps[place] == step):
            evidence.append(
                phrases.scalar(f"clip/{name}", int(other.steps[place]), other.values[place], unit)
            )
    has_scaler = len(run.scalar("scaler/scale").steps) > 0
    limit = str(evidence[-1].value) if evidence and evidence[-1].path.endswith("limit") else "the clip norm"
    if scale_free:
        divide = "divides" if len(scale_free) == 1 else "divide"
        effect = (
            f"{listed(scale_free)} {divide} by the size of the gradients, so that a constant factor changes "
            "no step: clipping only evens out how large the gradients of different steps are."
        )
    else:
        effect = "The clip norm sets the length of the gradient, and so acts as part of the learning rate."
    yield Finding(
        severity=Severity.WARNING if hard else Severity.INFO,
        title=f"Clipping is active at {percent(share)} of the steps",
        detail=(
            f"Clipping is active at {percent(share)} of the steps from {int(steps[0])} on "
            f"({count(len(steps), 'recorded step')}), with a median factor of {phrases.number(median)}. "
            f"{effect}"
        ),
        subject=Subject(step=int(steps[0])),
        evidence=tuple(evidence),
        fix=(
            f"Set the clip norm (now {limit}) near the usual total norm, so that it catches only outliers, "
            "or reduce the norm: average the loss over the batch"
            + (", or call `scaler.unscale_(optimizer)` before clipping." if has_scaler else ".")
        ),
        refuted_if="clipping every step is intended, as in normalised or differentially private SGD.",
    )


def _zeroed(run: Run, steps: Integers, factors: Floats) -> Finding:
    zero = steps[factors == 0]
    norm = run.scalar("clip/norm")
    place = int(np.searchsorted(norm.steps, zero[0]))
    return Finding(
        severity=Severity.ERROR,
        title="Clipping sets every gradient to zero",
        detail=(
            f"At {count(len(zero), 'recorded step')} from step {int(zero[0])} on the total norm overflowed: "
            "clipping divides by it, and what is left is 0. Nothing is learned at these steps."
        ),
        subject=Subject(step=int(zero[0])),
        evidence=(phrases.scalar("clip/norm", int(zero[0]), float(norm.values[place]), "gradient"),),
        fix=(
            "Find what makes the gradients so large: a factor on the loss, or a division by almost 0. With "
            "`error_if_nonfinite=True` `clip_grad_norm_` raises instead."
        ),
        refuted_if="the total norm is finite at these steps.",
    )
