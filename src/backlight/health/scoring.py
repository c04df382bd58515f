"""Which gradients vanish, which explode, and the health of a step; FORMULAS: section 1, gradient health.

S recorded steps, P parameters. What was not measured is neither healthy nor ill: it is left out of
every share, and a step at which nothing was measured has no health at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.health.history import at_steps, finite_median, running_median
from backlight.health.thresholds import Thresholds
from backlight.store.reader import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]


def vanishing(rms: Floats, measured: Bools, limits: Thresholds) -> Bools:
    """Mark the parameters whose gradient vanishes; parameters are the last axis.

    An rms vanishes below ``vanishing_rms`` and below ``vanishing_relative`` times the median over the
    measured parameters whose gradient is not zero everywhere. An exact zero always does: were it judged
    by the median, a model of which more than half is dead would have nothing that vanishes.
    """
    median = finite_median(np.where(measured & (rms > 0), rms, np.nan))[..., None]
    with np.errstate(invalid="ignore"):  # comparisons with NaN are False, as wanted
        small = (rms < limits.vanishing_rms) & (rms < limits.vanishing_relative * median)
    return np.asarray(measured & (small | (rms == 0)), dtype=np.bool_)


def exploding(
    rms: Floats,
    measured: Bools,
    medians: Floats,
    limits: Thresholds,
    *,
    total_norm: Floats | float = np.nan,
    clip_norm: Floats | float = np.nan,
) -> Bools:
    """Mark the parameters whose gradient explodes; parameters are the last axis.

    Parameters
    ----------
    rms, measured, medians:
        The rms per parameter, where it was measured, and the running median of the steps before (NaN
        where there is no history yet; a median of 0 says nothing about size and is not judged).
    limits:
        ``exploding_factor`` times its own median is too much, as long as the rms is not below
        ``vanishing_rms``; so is a total norm above ``exploding_clip_factor`` times the clip norm, which
        marks every measured parameter of that step.
    total_norm, clip_norm:
        Norm over all parameters before clipping, and the clip norm in use; NaN where there is none.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        own = (medians > 0) & (rms > limits.exploding_factor * medians) & (rms >= limits.vanishing_rms)
        whole = np.asarray(total_norm > limits.exploding_clip_factor * np.asarray(clip_norm))[..., None]
    return measured & (own | whole)


def health(
    measured: Bools, vanishes: Bools, explodes: Bools, finite: Bools | np.bool_ | bool, limits: Thresholds
) -> Floats:
    """Return ``clamp(1 - 0.5 share_vanishing - 0.8 share_exploding, 0, 1)``, over the last axis.

    0 where ``finite`` (one per step) is False, NaN where no parameter was measured. The weights are
    ``penalty_vanishing`` and ``penalty_exploding``.
    """
    count = np.sum(measured, axis=-1)
    lost = limits.penalty_vanishing * np.sum(vanishes & measured, axis=-1)
    lost = lost + limits.penalty_exploding * np.sum(explodes & measured, axis=-1)
    score = np.clip(1.0 - lost / np.maximum(count, 1), 0.0, 1.0)
    return np.where(count == 0, np.nan, np.where(finite, score, 0.0))


@dataclass(frozen=True)
class Health:
    """The health of a run over its recorded steps.

    ``score`` is NaN where nothing was measured. The counts are of parameters; ``measured`` is the number
    that each share is of.
    """

    steps: Integers
    score: Floats
    measured: Integers
    vanishing: Integers
    exploding: Integers
    non_finite: Integers

    def at(self, row: int) -> float | None:
        """Return the health of one recorded step, None where it was not measured."""
        value = float(self.score[row])
        return None if np.isnan(value) else value


def health_series(run: Run, limits: Thresholds | None = None) -> Health:
    """Score every recorded step of a run.

    Parameters
    ----------
    run:
        A stored run; one without a gradient series gives empty arrays.
    limits:
        Thresholds; without them, the defaults with what the run itself recorded as overridden. What this
        release does not know of that is left out here; judging the run says so.
    """
    if limits is None:
        limits = Thresholds.recorded(run.overrides.get("health", {}))[0]
    if not run.has("gradient"):
        none = np.zeros(0, dtype=np.int64)
        return Health(none, np.zeros(0), none, none, none, none)
    frame = run.frame("gradient", "rms")
    ill_SP = np.asarray(run.frame("gradient", "non_finite").values > 0) & frame.measured
    rms_SP = np.where(frame.measured, frame.values, np.nan)
    vanishes_SP = vanishing(rms_SP, frame.measured, limits)
    explodes_SP = exploding(
        rms_SP,
        frame.measured,
        running_median(rms_SP, limits.history_window, limits.history_refresh, limits.history_minimum),
        limits,
        total_norm=total_norms(run, frame.steps),
        clip_norm=clip_norms(run, frame.steps),
    )
    return Health(
        steps=frame.steps,
        score=health(frame.measured, vanishes_SP, explodes_SP, ~ill_SP.any(axis=1), limits),
        measured=frame.measured.sum(axis=1),
        vanishing=vanishes_SP.sum(axis=1),
        exploding=explodes_SP.sum(axis=1),
        non_finite=ill_SP.sum(axis=1),
    )


def total_norms(run: Run, steps_S: Integers) -> Floats:
    """Return the L2 norm over all parameters at ``steps_S``: as recorded, else from the gradient series.

    A step at which nothing was measured, or only a part of what others have, is NaN unless recorded.
    """
    known = run.scalar("total_norm")
    norms_S = at_steps(steps_S, known.steps, known.values)
    if not np.isnan(norms_S).any() or not run.has("gradient"):
        return norms_S
    frame = run.frame("gradient", "norm")
    present_S = frame.measured.sum(axis=1)
    whole_S = present_S == (present_S.max() if len(present_S) else 0)
    with np.errstate(over="ignore"):
        sums_S = np.sqrt(np.sum(np.where(frame.measured, frame.values, 0.0) ** 2, axis=1))
    joined_S = at_steps(steps_S, frame.steps, np.where(whole_S & (present_S > 0), sums_S, np.nan))
    recorded_S = np.isin(steps_S, known.steps)
    return np.where(recorded_S, norms_S, joined_S)


def clip_norms(run: Run, steps_S: Integers) -> Floats:
    """Return the clip norm in use at ``steps_S``; NaN where gradients were not clipped by norm."""
    seen, limit = run.scalar("clip/norm"), run.scalar("clip/limit")
    by_norm_S = np.isin(steps_S, seen.steps)
    return np.where(by_norm_S, at_steps(steps_S, limit.steps, limit.values), np.nan)


def skipped_steps(run: Run) -> frozenset[int]:
    """Return the steps that a gradient scaler skipped, so that their gradients moved nothing."""
    known = run.scalar("scaler/skipped")
    return frozenset(int(step) for step in known.steps[known.values > 0])
