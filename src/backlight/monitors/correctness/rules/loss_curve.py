"""Rule ``loss_not_falling``: a loss at chance, one that never falls below its start, or one that diverges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.findings.losses import sole_loss
from backlight.findings.recorded_steps import equal_parts
from backlight.monitors.correctness.model.facts import facts_of
from backlight.monitors.correctness.rules.uneven_microbatches import Classes
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class LossLimits(Limits, monitor="correctness"):
    """Limits of the rule ``loss_not_falling``."""

    loss_steps: int = limit(200, "steps of a run before its loss is evaluated", low=1)
    loss_settled: int = limit(
        1000, "steps from which on it is a warning; networks with many classes begin slowly", low=1
    )
    loss_windows: int = limit(10, "equally long parts of the run whose median losses are compared", low=3)
    loss_values: int = limit(5, "recorded losses that each part needs", low=1)
    chance_deviation: float = limit(0.02, "relative deviation from the loss of equal probabilities", high=1.0)
    diverged_ratio: float = limit(
        1.5, "last median loss over the larger of the first one and that of equal probabilities", low=1.0
    )


@rule(
    "loss_not_falling", monitor="correctness", limits=LossLimits, is_statistic=True,
    explained_by=(
        "exploding", "gradients_discarded", "gradients_not_cleared", "large_update", "loss_input",
        "loss_scale", "mixed_precision", "no_gradient", "no_update", "non_finite", "schedule",
        "trained_tensors", "weights_changed", "weights_unchanged",
    ),
)  # fmt: skip
def loss_not_falling(run: Run, limits: LossLimits) -> Iterator[Finding]:
    """Find losses that show no learning; a warning only where the loss compares classes and nothing else."""
    loss = sole_loss(run)  # networks that train against each other have losses that rise
    is_finite = np.isfinite(loss.values)
    steps, values = loss.steps[is_finite], loss.values[is_finite]
    medians = _medians(run, steps, values, limits)
    if medians is None:
        return
    first, last = float(medians[0]), float(medians[-1])
    chance, classes = _chance(run)
    is_settled = bool(chance) and steps[-1] - steps[0] >= limits.loss_settled
    at = int(steps[-1])
    evidence = [phrases.scalar("loss", at, float(values[-1]), loss.unit)]
    stated = (
        f"Of {limits.loss_windows} equally long parts of the run, the first has a median loss of "
        f"{phrases.number(first)}, the last {phrases.number(last)}"
    )
    if chance and _is_near(medians[1:], chance, limits):
        evidence.append(Evidence(f"events/{Classes.event}", None, classes, "classes"))
        title = f"The loss is that of guessing among {classes} classes"
        detail = (
            f"{stated}; equal probabilities for all classes give {phrases.number(chance)}. So far the model "
            "has learned nothing that predicts the labels."
        )
        fix = (
            "Compare a few inputs with their labels as the loss function gets them. Then train on one batch: "
            "if that loss falls to 0, the data is the cause, else the model, the loop or the learning rate."
        )
        refuted_if = "the labels are random on purpose, or the loss falls later."
    elif chance and last > limits.diverged_ratio * max(first, chance):
        title = "The loss rises above that of guessing"
        detail = f"{stated}; equal probabilities for all {classes} classes give {phrases.number(chance)}."
        fix = "Lower the learning rate, and look at the steps at which the loss leaves its lowest value."
        refuted_if = "the data becomes harder on purpose during the run."
    elif medians[1:].min() >= first and values.min() >= 0:  # one of both signs has no size: an actor's
        title = "The loss never falls below its start"
        detail = f"{stated}, and none has a lower one than the first."
        fix = "Train on one batch: if that loss does not fall, the loop or the learning rate is the cause."
        refuted_if = (
            "the loss is not meant to fall, as that of an actor, a critic with moving targets or a generator."
        )
    else:
        return
    yield Finding(
        severity=Severity.WARNING if is_settled else Severity.INFO,
        title=title,
        detail=detail,
        subject=Subject(step=at),
        evidence=tuple(evidence),
        fix=fix,
        refuted_if=refuted_if,
    )


def _medians(
    run: Run, steps: NDArray[np.int64], values: NDArray[np.float64], limits: LossLimits
) -> NDArray[np.float64] | None:
    """Return the median loss of parts of equally many steps; None where one has too few recorded losses."""
    if not len(steps) or steps[-1] - steps[0] < limits.loss_steps:
        return None
    parts = [values[rows] for rows in equal_parts(steps, limits.loss_windows, run.last_step())]
    if min(map(len, parts)) < limits.loss_values:
        return None
    return np.array([np.median(part) for part in parts])


def _chance(run: Run) -> tuple[float, int]:
    """Return the loss of equal probabilities, as it is recorded, and the classes; 0 where unknown."""
    facts = facts_of(run, Classes)
    if not facts:
        return 0.0, 0
    return max(facts[-1].factor, 0.0) * math.log(max(facts[-1].classes, 1)), facts[-1].classes


def _is_near(medians: NDArray[np.float64], chance: float, limits: LossLimits) -> bool:
    return bool(np.all(np.abs(medians - chance) <= limits.chance_deviation * chance))
