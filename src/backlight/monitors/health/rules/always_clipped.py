"""Rule ``always_clipped``: clipping is active at nearly every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

SCALE_FREE = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Lion",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    }
)
"""Optimizers whose step hardly changes if all gradients shrink by one factor."""


@dataclass(frozen=True)
class ClippedLimits(Limits, monitor="health"):
    """Limits of the rule ``always_clipped``."""

    clipped_share: float = limit(0.95, "share of the settled steps at which clipping was active", high=1.0)
    clipped_steps: int = limit(50, "settled steps that the rule needs", low=1)
    clipped_settle: float = limit(
        0.2, "first share of the run that is left out: early gradients are large", high=0.9
    )
    clipped_hard: float = limit(
        0.1,
        "median factor below which it is a warning, unless every optimizer divides by the size of the "
        "gradient: a step is then shortened more than tenfold",
        source="docs/formulas.md, section 1",
        high=1.0,
    )


@rule("always_clipped", monitor="health", limits=ClippedLimits)
def always_clipped(run: Run, limits: ClippedLimits) -> Iterator[Finding]:
    """Find clipping that is active at nearly all steps after the first part of a run.

    A mild factor is a remark: the norm then acts as a constant of the learning rate. A hard one says
    that clip norm and gradients do not belong together.
    """
    factors = run.scalar("clip/factor")
    known = np.isfinite(factors.values)
    steps, values = factors.steps[known], factors.values[known]
    settled = int(np.ceil(limits.clipped_settle * len(steps)))
    steps, values = steps[settled:], values[settled:]
    if len(steps) < limits.clipped_steps:
        return
    active = values < 1.0
    if active.mean() < limits.clipped_share:
        return
    median = float(np.median(values))
    stored = run.fingerprint()
    scale_free = stored is not None and bool(stored.optimizers) and SCALE_FREE.issuperset(stored.optimizers)
    hard = median < limits.clipped_hard and not scale_free
    middle = int(np.argmin(np.abs(values - median)))
    evidence = [phrases.scalar("clip/factor", int(steps[middle]), values[middle])]
    for name, unit in (("clip/norm", "gradient"), ("clip/limit", "gradient")):
        other = run.scalar(name)
        place = np.flatnonzero(other.steps == steps[middle])
        if len(place):
            evidence.append(phrases.scalar(name, int(steps[middle]), other.values[place[0]], unit))
    limit = str(evidence[-1].value) if evidence[-1].path.endswith("limit") else "the clip norm"
    yield Finding(
        severity=Severity.WARNING if hard else Severity.INFO,
        title=f"Clipping is active in {100 * float(active.mean()):.0f} % of the steps",
        detail=(
            f"{phrases.share(int(active.sum()), len(steps), 'steps')} from step {int(steps[0])} on are "
            f"clipped, with a median factor of {phrases.number(median)}. "
            + (
                f"Clipping shrinks gradients more than {phrases.number(1 / limits.clipped_hard)}-fold: the "
                "clip norm alone sets their length."
                if hard
                else "The clip norm acts as part of the learning rate."
            )
        ),
        subject=Subject(step=int(steps[0])),
        evidence=tuple(evidence),
        fix=(
            f"Set the clip norm (now {limit}) near the usual total norm, so that it catches only outliers, "
            "or reduce the norm: average the loss over the batch, or call `scaler.unscale_(optimizer)` "
            "before clipping."
        ),
        refuted_if="clipping every step is intended, as in normalised or differentially private SGD.",
    )
