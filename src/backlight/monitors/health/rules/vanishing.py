"""Rule ``vanishing``: parameters whose gradient is too small to learn from, though not zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import limit
from backlight.findings.recorded_steps import step_weights, weighted_share
from backlight.monitors.health.model import score
from backlight.monitors.health.model.history import (
    Bools,
    Integers,
    ending,
    ending_median,
    ending_share,
    finite_median,
)
from backlight.monitors.health.model.score import ROUNDING_SHARE, VanishingMaskLimits
from backlight.records import Finding, RunStatus, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run

CHUNK = 256
"""Steps with a small value that are looked at at once for the first one that vanishes."""


@dataclass(frozen=True)
class VanishingLimits(VanishingMaskLimits):
    """Limits of the rule ``vanishing``."""

    vanishing_window: int = limit(
        20, "recorded steps over which a parameter must vanish: one batch is an accident", low=1
    )
    vanishing_share: float = limit(
        0.9, "share of those steps at which it must vanish, since values near a limit flicker", high=1.0
    )
    vanishing_spread: float = limit(
        0.25, "share of the measured parameters above which the finding is an error", high=1.0
    )
    vanishing_everywhere: float = limit(
        1e-10,
        "an rms that no parameter exceeds, from the first steps on: a hundredth of Adam's default eps, which "
        "then sets the size of its steps; a model that converged had larger gradients at its start",
        source="torch.optim.Adam: eps 1e-8; the factor is chosen",
    )
    vanishing_steps: int = limit(
        3, "the same in a run that has ended: a short one is run to find such an error", low=1
    )
    vanishing_updates: float = limit(
        1e-6, "updates above this share of a weight move it, however small its gradient is"
    )


@rule(
    "vanishing", monitor="health", limits=VanishingLimits, needs=("gradient",), is_statistic=True,
    explained_by=("large_update", "loss_input"),
)  # fmt: skip
def vanishing(run: Run, limits: VanishingLimits) -> Iterator[Finding]:
    """Find parameters that vanish at nearly all of the last recorded steps.

    Vectors alone are worth a hint only: a bias in front of a normalisation, or the key bias of an
    attention, has by construction no effect on the loss. Its gradient is the rounding error of a sum that
    is zero.
    """
    frame = run.frame("gradient", "rms")
    measured_SP = frame.measured & np.isfinite(frame.values)
    if (everywhere := _everywhere(run, frame, measured_SP, limits)) is not None:
        yield everywhere
        return
    start = ending(measured_SP, limits.vanishing_window)
    hits_TP = _hits(frame, measured_SP, slice(start, None), limits)
    shares_P = ending_share(hits_TP, measured_SP[start:], limits.vanishing_window)
    columns = np.flatnonzero((shares_P >= limits.vanishing_share) & (shares_P > 0))
    if len(columns) == 0:
        return
    values_TP, measured_TP = frame.values[start:], measured_SP[start:]
    alive_TP = np.where(measured_TP & (values_TP > 0), values_TP, np.nan)
    medians_P = ending_median(alive_TP, measured_TP, limits.vanishing_window)
    usual = float(finite_median(finite_median(alive_TP[-limits.vanishing_window :])))
    shapes = {p.name: p.shape for p in run.parameters()}
    matrices = [i for i in columns if len(shapes[frame.names[i]]) >= 2]
    worst = int(min(matrices or columns, key=lambda i: (medians_P[i], i)))
    name, size = frame.names[worst], float(medians_P[worst])
    count, whole = len(columns), int(measured_SP.any(axis=0).sum())
    is_redundant = not matrices and all(medians_P[i] < ROUNDING_SHARE * usual for i in columns)
    if not matrices:
        severity, remark = Severity.INFO, "; all are vectors, which may have no effect by construction"
    else:
        severity = Severity.ERROR if count / whole > limits.vanishing_spread else Severity.WARNING
        remark = ""
    rows = phrases.loudest(columns.tolist(), lambda i: -float(medians_P[i]))
    evidence = []
    for row in rows:
        last = start + int(np.flatnonzero(hits_TP[:, row])[-1])
        evidence.append(
            phrases.series(
                "gradient/rms", frame.names[row], int(frame.steps[last]), float(frame.values[last, row])
            )
        )
    names = [name, *(frame.names[row] for row in rows if row != worst)]
    first = int(frame.steps[_first(frame, measured_SP, worst, limits)])
    yield Finding(
        severity=severity,
        title=(
            f"{phrases.parameters(names, count)} {'is' if count == 1 else 'are'} redundant"
            if is_redundant
            else f"{phrases.gradient_of(names, count)} vanish{'es' if count == 1 else ''}"
        ),
        detail=(
            f"The rms of `{name}` is {phrases.number(size)} over the last {limits.vanishing_window} recorded "
            f"steps, {phrases.number(size / usual)} times the median over parameters; it first vanished at "
            f"step {first}. Affected: {phrases.share(count, whole, 'measured parameters')}{remark}."
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=first),
        evidence=tuple(evidence),
        fix=(
            f"Leave `{name}` out (`bias=False`): a normalisation that follows subtracts it again, and a "
            "softmax over keys ignores it."
            if is_redundant
            else f"Follow the gradient over depth in the report, from the loss down to `{name}`. Where it "
            "drops, look for saturated activations, a missing residual connection or normalisation, or a "
            "small initial scale."
        ),
        refuted_if=(
            f"the rms of `{name}` rises above {limits.vanishing_rms:g} or {limits.vanishing_relative:g} "
            "times the median, or the weight moves like the others (series `update/ratio`): Adam rescales "
            "small gradients."
        ),
    )


def _everywhere(run: Run, frame: Frame, measured_SP: Bools, limits: VanishingLimits) -> Finding | None:
    """Return the finding where every gradient of the run is too small, unless the weights move."""
    with np.errstate(invalid="ignore"):
        largest_S = np.where(measured_SP, frame.values, 0.0).max(axis=1, initial=0.0)
    rows = np.flatnonzero(measured_SP.any(axis=1))
    largest, weights = largest_S[rows], step_weights(frame.steps[rows])
    small = largest < limits.vanishing_everywhere
    needed = limits.vanishing_window if run.status is RunStatus.RUNNING else limits.vanishing_steps
    if len(rows) < needed or weighted_share(small, weights) < limits.vanishing_share:
        return None
    if not small[: limits.vanishing_window // 2].all() or not (largest > 0).any():
        return None
    if run.has("update"):
        ratio = run.frame("update", "ratio")
        if (finite_median(np.where(ratio.measured, ratio.values, np.nan)) > limits.vanishing_updates).any():
            return None
    row = int(rows[np.argmax(largest)])
    column = int(np.argmax(np.where(measured_SP[row], frame.values[row], 0.0)))
    name, value, step = frame.names[column], float(frame.values[row, column]), int(frame.steps[row])
    return Finding(
        severity=Severity.WARNING,
        title=f"All gradients are below {phrases.number(limits.vanishing_everywhere)}",
        detail=(
            f"The largest rms of a parameter in {len(rows)} recorded steps is {phrases.number(value)} "
            f"(`{name}`, step {step}): the weights hardly move, and Adam adds an eps of 1e-8 to it."
        ),
        subject=Subject(
            parameter=name, module=phrases.modules_of(run).get(name), step=int(frame.steps[rows[0]])
        ),
        evidence=(phrases.series("gradient/rms", name, step, value),),
        fix=(
            "Look for the factor: a loss that is divided twice or by a large number, a scale that is not "
            "undone, outputs that saturate."
        ),
        refuted_if="the weights move as in other runs (series `update/ratio`).",
    )


def _hits(frame: Frame, measured_SP: Bools, rows: slice | Integers, limits: VanishingLimits) -> Bools:
    """Mark what vanishes without being zero at some rows."""
    values = frame.values[rows]
    return score.vanishing(values, measured_SP[rows], limits) & (values > 0)


def _first(frame: Frame, measured_SP: Bools, column: int, limits: VanishingLimits) -> int:
    """Return the first row at which a parameter vanishes that does so somewhere."""
    values_S = frame.values[:, column]
    small = np.flatnonzero(measured_SP[:, column] & (values_S < limits.vanishing_rms))
    hits = (
        rows[_hits(frame, measured_SP, rows, limits)[:, column]]
        for rows in np.split(small, range(CHUNK, len(small), CHUNK))
    )
    return int(next(rows[0] for rows in hits if len(rows)))
