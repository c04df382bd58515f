"""Rule ``accumulating``: gradients grow as if they were never set to zero between steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from backlight.health import wording
from backlight.health.scoring import total_norms
from backlight.health.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.reader import Run


@rule(
    "accumulating",
    room="health",
    thresholds=(
        "accumulating_steps",
        "accumulating_growth",
        "accumulating_power_low",
        "accumulating_power_high",
        "accumulating_r2",
        "accumulating_share",
    ),
    needs=("gradient",),
)
def accumulating(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Fit a power of the number of steps to the total norm since the start of each attempt.

    The sum of t gradients grows between the root of t (noise) and t (signal), smoothly, in nearly every
    parameter, from the first step on. It is judged where the number of backward passes per step is the
    same at every step, since a growing accumulation would look alike.
    """
    frame = run.frame("gradient", "norm")
    for attempt in run.attempts:
        later = [a.step_offset for a in run.attempts if a.step_offset > attempt.step_offset]
        mine = (frame.steps >= attempt.step_offset) & (frame.steps < min(later, default=2**62))
        rows = np.flatnonzero(mine)[: limits.accumulating_steps]
        if len(rows) < limits.accumulating_steps or not _constant_backwards(run, frame.steps[rows]):
            continue
        since = (frame.steps[rows] - attempt.step_offset + 1).astype(float)
        norms = total_norms(run, frame.steps[rows])
        if not (np.isfinite(norms).all() and (norms > 0).all()):
            continue
        power, explained = power_law(since, norms)
        growth = float(norms[-1] / norms[0])
        if not (
            growth >= limits.accumulating_growth
            and limits.accumulating_power_low <= power <= limits.accumulating_power_high
            and explained >= limits.accumulating_r2
        ):
            continue
        values_RP, measured_RP = frame.values[rows], frame.measured[rows]
        whole_P = measured_RP.all(axis=0) & (values_RP > 0).all(axis=0) & np.isfinite(values_RP).all(axis=0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            grown_P = values_RP[-1] / values_RP[0]
        growing = int(np.sum(whole_P & (grown_P >= np.sqrt(limits.accumulating_growth))))
        if not whole_P.any() or growing / int(whole_P.sum()) < limits.accumulating_share:
            continue
        yield _finding(run, frame.steps[rows], norms, power, explained, growing, int(whole_P.sum()))
        return


def power_law(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Return the exponent p of ``y ~ x^p`` and the share of the variance of log y that it explains."""
    u, v = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    power = float(u @ v / (u @ u))
    residual = v - power * u
    return power, 1.0 - float(residual @ residual) / max(float(v @ v), 1e-30)


def _constant_backwards(run: Run, steps: NDArray[np.int64]) -> bool:
    """Tell whether each of the steps had the same number of backward passes, where that is known."""
    known = run.scalar("backwards")
    values = known.values[np.isin(known.steps, steps)]
    return len(values) == 0 or bool((values == values[0]).all())


def _finding(
    run: Run,
    steps: NDArray[np.int64],
    norms: NDArray[np.float64],
    power: float,
    explained: float,
    growing: int,
    whole: int,
) -> Finding:
    picked = np.unique(np.linspace(0, len(steps) - 1, wording.EVIDENCE_ROWS).round().astype(int))
    evidence = [wording.scalar("total_norm", int(steps[i]), norms[i], "gradient") for i in picked]
    backwards = run.scalar("backwards")
    per_step = ""
    if len(backwards.steps):
        per_step = (
            f", with {wording.plural(int(backwards.values[0]), 'backward pass')} in every step".replace(
                "passs", "passes"
            )
        )
        evidence.append(
            Evidence("scalars/backwards", int(backwards.steps[0]), float(backwards.values[0]), "1")
        )
    return Finding(
        rule="accumulating",
        severity=Severity.ERROR,
        claim=(
            f"Gradients grow as if they were never set to zero: the total norm rises from "
            f"{wording.number(norms[0])} at step {int(steps[0])} to {wording.number(norms[-1])} at step "
            f"{int(steps[-1])}, as the number of steps to the power {power:.2f} (the fit explains "
            f"{100 * explained:.1f} %), and so does that of {wording.share(growing, whole)} of the "
            f"parameters{per_step}."
        ),
        subject=Subject(step=int(steps[0])),
        evidence=tuple(evidence),
        next_check=(
            "Look for optimizer.zero_grad() in the loop: it must run once per optimizer step, before "
            "backward "
            "and for every optimizer; then see whether the norm still grows."
        ),
        refuted_if=(
            "zero_grad() runs at every step, or the norm of a single batch's gradient, computed from cleared "
            "gradients at the same weights, is as large as the recorded one."
        ),
    )
