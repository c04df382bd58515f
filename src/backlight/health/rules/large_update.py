"""Rule ``large_update``: steps that replace a large part of a weight, long after the start."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backlight.health import wording
from backlight.health.thresholds import Thresholds
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.reader import Run

FROM_ZERO = 1e-3
"""A weight whose first norm is below this share of its present one counts as started at zero."""


@rule(
    "large_update",
    room="health",
    thresholds=("update_ratio", "update_steps", "update_settle", "update_settle_zero"),
    needs=("update",),
)
def large_update(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find matrices whose median ratio of step to weight stays large.

    Vectors are left out: a bias starts at zero, and a ratio to nearly nothing says nothing.
    """
    frame, weight = run.frame("update", "ratio"), run.frame("update", "weight_norm")
    if len(frame.steps) == 0:
        return
    shapes = {p.name: p.shape for p in run.parameters()}
    since = frame.steps - frame.steps[0]
    found: dict[int, float] = {}
    judged = 0
    for column, name in enumerate(frame.names):
        if len(shapes[name]) < 2:
            continue
        usable = frame.measured[:, column] & np.isfinite(frame.values[:, column])
        measured = np.flatnonzero(frame.measured[:, column])
        if len(measured) == 0:
            continue
        now = float(weight.values[measured[-1], column])
        from_zero = float(weight.values[measured[0], column]) < FROM_ZERO * now
        rows = np.flatnonzero(
            usable & (since >= (limits.update_settle_zero if from_zero else limits.update_settle))
        )
        if len(rows) < limits.update_steps:
            continue
        judged += 1
        median = float(np.median(frame.values[rows[-limits.update_steps :], column]))
        if median > limits.update_ratio:
            found[column] = median
    if not found:
        return
    order = wording.loudest(found, lambda c: found[c])
    worst = order[0]
    name = frame.names[worst]
    record = next(p for p in run.parameters() if p.name == name)
    last = int(np.flatnonzero(frame.measured[:, worst])[-1])
    rate = run.scalar(f"lr/{record.group}")
    evidence = [
        wording.series("update/ratio", frame.names[c], int(frame.steps[last]), frame.values[last, c], "1")
        for c in order
    ]
    if len(rate.values):
        evidence.append(wording.scalar(f"lr/{record.group}", int(rate.steps[-1]), rate.values[-1]))
    stated = f" at a learning rate of {wording.number(float(rate.values[-1]))}" if len(rate.values) else ""
    yield Finding(
        rule="large_update",
        severity=Severity.WARNING,
        claim=(
            f"The steps of {name}{wording.others(len(found) - 1)} are large: in the last "
            f"{limits.update_steps} "
            f"recorded steps one step changed it by {wording.number(found[worst])} of its own norm (median)"
            f"{stated}, where about 0.001 is usual; that holds for {wording.share(len(found), judged)} "
            "of the "
            "weight matrices."
        ),
        subject=Subject(parameter=name, module=record.module or None, step=int(frame.steps[last])),
        evidence=tuple(evidence),
        next_check=(
            "Train a short run with a tenth of the learning rate and compare the loss after equal steps."
        ),
        refuted_if=(
            "the loss falls faster than at a tenth of the learning rate, or the norm of the weight is "
            "small by "
            "design (a strong weight decay, an adapter that starts at zero)."
        ),
    )
