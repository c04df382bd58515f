"""Rule ``accumulating``: gradients grow as if they were never set to zero between steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.health.model.score import total_norms
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run


@dataclass(frozen=True)
class AccumulatingLimits(Limits, monitor="health"):
    """Limits of the rule ``accumulating``."""

    accumulating_steps: int = limit(
        12, "first recorded steps of an attempt that the fit takes, and then twice as many", low=5
    )
    accumulating_growth: float = limit(
        4.0, "factor by which the total norm must have grown since the gradients were last zero", low=1.0
    )
    accumulating_power_low: float = limit(
        0.4, "lowest exponent of growth with the number of steps; sums of pure noise grow as its root, 0.5"
    )
    accumulating_power_high: float = limit(
        1.3, "highest exponent; sums of equal gradients grow linearly, 1.0, and faster is something else"
    )
    accumulating_r2: float = limit(
        0.93,
        "share of the variance of log norm that the power law must explain",
        source="360 small runs, faulty and healthy: at 0.93 none of the healthy fits, at 0.85 three do",
        high=1.0,
    )
    accumulating_share: float = limit(
        0.8, "share of the parameters that must grow so: what forgets to zero forgets all", high=1.0
    )


@rule("accumulating", monitor="health", limits=AccumulatingLimits, needs=("gradient",))
def accumulating(run: Run, limits: AccumulatingLimits) -> Iterator[Finding]:
    """Fit a power of the number of steps to the total norm since the start of each attempt.

    The sum of t gradients grows between the root of t (noise) and t (signal), smoothly, in nearly every
    parameter, from the first step on. It is evaluated where the number of backward passes per step is the
    same at every step, since a growing accumulation would look alike.
    """
    frame = run.frame("gradient", "norm")
    for attempt in run.attempts:
        later = [a.step_offset for a in run.attempts if a.step_offset > attempt.step_offset]
        rows = np.flatnonzero(
            (frame.steps >= attempt.step_offset) & (frame.steps < min(later, default=2**62))
        )
        for count in (limits.accumulating_steps, 2 * limits.accumulating_steps):
            if len(rows) < count or not _constant_backwards(run, frame.steps[rows[:count]]):
                break
            finding = _growth(run, frame, rows[:count], attempt.step_offset, limits)
            if finding is not None:
                yield finding
                return


def _growth(
    run: Run, frame: Frame, rows: NDArray[np.int64], offset: int, limits: AccumulatingLimits
) -> Finding | None:
    """Fit the first rows of an attempt; None where they do not grow as sums would."""
    steps = frame.steps[rows]
    norms = total_norms(run, steps)
    if not (np.isfinite(norms).all() and (norms > 0).all()):
        return None
    if norms[-1] < limits.accumulating_growth * norms[0]:
        return None
    u, v = np.log(steps - offset + 1), np.log(norms)
    power, explained = float(np.polyfit(u, v, 1)[0]), float(np.corrcoef(u, v)[0, 1] ** 2)
    in_range = limits.accumulating_power_low <= power <= limits.accumulating_power_high
    if not in_range or explained < limits.accumulating_r2:
        return None
    values_RP = frame.values[rows]
    usable_RP = frame.measured[rows] & np.isfinite(values_RP) & (values_RP > 0)
    whole_P = usable_RP.all(axis=0)
    grown = values_RP[-1, whole_P] >= np.sqrt(limits.accumulating_growth) * values_RP[0, whole_P]
    if len(grown) == 0 or grown.mean() < limits.accumulating_share:
        return None
    law = f"{power:.2f} (R² {explained:.3f})"
    return _finding(run, steps, norms, law, phrases.share(int(grown.sum()), len(grown), "parameters"))


def _constant_backwards(run: Run, steps: NDArray[np.int64]) -> bool:
    """Return whether each of the steps had the same number of backward passes, where that is known."""
    known = run.scalar("backwards")
    values = known.values[np.isin(known.steps, steps)]
    return len(values) == 0 or bool((values == values[0]).all())


def _finding(
    run: Run, steps: NDArray[np.int64], norms: NDArray[np.float64], law: str, growing: str
) -> Finding:
    picked = np.unique(np.linspace(0, len(steps) - 1, phrases.EVIDENCE_ROWS).round().astype(int))
    evidence = [phrases.total_norm(run, int(steps[i]), norms[i]) for i in picked]
    backwards = run.scalar("backwards")
    per_step = ""
    if len(backwards.steps):
        passes = int(backwards.values[0])
        per_step = f", with {passes} backward pass{'es' if passes != 1 else ''} in every step"
        evidence.append(phrases.scalar("backwards", int(backwards.steps[0]), passes))
    return Finding(
        severity=Severity.ERROR,
        title="Gradients accumulate across steps, as if they were never zeroed",
        detail=(
            f"The total norm rises from {phrases.number(norms[0])} at step {int(steps[0])} to "
            f"{phrases.number(norms[-1])} at step {int(steps[-1])}, as the number of steps to the power "
            f"{law}. The norm grows in {growing}{per_step}."
        ),
        subject=Subject(step=int(steps[0])),
        evidence=tuple(evidence),
        fix=("Call `optimizer.zero_grad()` once per optimizer step, before backward, for every optimizer."),
        refuted_if=(
            "`zero_grad()` runs at every step, or the gradient of a single batch, computed from cleared "
            "gradients at the same weights, has the recorded norm."
        ),
    )
