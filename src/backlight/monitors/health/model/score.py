"""Which gradients vanish, which explode, and the health of a step; docs/formulas.md, section 1.

S recorded steps, P parameters. What was not measured is neither healthy nor ill: it is left out of
every share, and a step at which nothing was measured has no health at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings.limits import Limits, known_overrides, limit, with_overrides
from backlight.monitors.health.model.history import at_steps, finite_median, medians_outrun, present
from backlight.store.read.run import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]


ROUNDING_SHARE = 1e-5
"""Share of the median rms over parameters below which a gradient may be the rounding error of a sum that is
zero, as that of a bias before a batch norm is: the epsilon of fp32 times the root of 10,000 terms."""


@dataclass(frozen=True)
class RmsLimits(Limits, monitor="health"):
    """The smallest rms that can move a weight."""

    vanishing_rms: float = limit(
        1e-8,
        "an rms below it moves no fp32 weight of ordinary size at ordinary learning rates",
        source="docs/formulas.md, section 1",
    )


@dataclass(frozen=True)
class VanishingMaskLimits(RmsLimits):
    """When a parameter vanishes at one step."""

    vanishing_relative: float = limit(
        1e-4,
        "an rms below this share of the median over parameters; alone, the absolute limit would also call "
        "a converged model vanishing",
        source="docs/formulas.md, section 1",
        high=1.0,
    )


@dataclass(frozen=True)
class ExplodingMaskLimits(RmsLimits):
    """When a parameter explodes at one step."""

    exploding_factor: float = limit(
        1e3,
        "an rms above this many times the parameter's own running median",
        source="docs/formulas.md, section 1",
        low=1.0,
    )
    exploding_clip_factor: float = limit(
        10.0,
        "a total norm above this many times the clip norm in use",
        source="docs/formulas.md, section 1",
        low=1.0,
    )
    history_window: int = limit(
        256,
        "recorded steps that a running median looks back on: long enough that a growth of 6 % per step "
        "outruns it by exploding_factor, short enough to forget the start of a run",
        source="chosen: 1.06^128 = 1.7e3, and the median of a geometric growth lags by half the window",
        low=4,
    )
    history_refresh: int = limit(
        16,
        "recorded steps between two computations of a running median (every step among the first 16): "
        "costs 1/16 and moves a median over 256 values little",
        low=1,
    )
    history_minimum: int = limit(
        5, "finite values that a running median needs; a run that diverges may last ten steps", low=1
    )


@dataclass(frozen=True)
class ScoreLimits(VanishingMaskLimits, ExplodingMaskLimits):
    """The health score of one step."""

    penalty_vanishing: float = limit(
        0.5,
        "health lost when every measured parameter vanishes: it may still learn, slowly",
        source="docs/formulas.md, section 1",
    )
    penalty_exploding: float = limit(
        0.8,
        "health lost when every measured parameter explodes: one such step can ruin weights",
        source="docs/formulas.md, section 1",
    )


def usual(rms: Floats, measured: Bools) -> Floats:
    """Return the median rms of the measured parameters whose gradient is not zero everywhere."""
    return finite_median(np.where(measured & (rms > 0), rms, np.nan))


def vanishing(
    rms: Floats, measured: Bools, limits: VanishingMaskLimits, median: Floats | None = None
) -> Bools:
    """Mark the parameters whose gradient vanishes; parameters are the last axis.

    An rms vanishes below ``vanishing_rms`` and below ``vanishing_relative`` times the ``median``, by default
    that of :func:`usual`. An exact zero always does: were it evaluated by the median, a model of which more
    than half is dead would have nothing that vanishes.
    """
    median = (usual(rms, measured) if median is None else median)[..., None]
    with np.errstate(invalid="ignore"):  # comparisons with NaN are False, as wanted
        small = (rms < limits.vanishing_rms) & (rms < limits.vanishing_relative * median)
    return np.asarray(measured & (small | (rms == 0)), dtype=np.bool_)


def exploding(
    rms: Floats,
    measured: Bools,
    medians: Floats,
    limits: ExplodingMaskLimits,
    *,
    total_norm: Floats | float = np.nan,
    clip_norm: Floats | float = np.nan,
) -> Bools:
    """Mark the parameters whose gradient explodes; parameters are the last axis.

    Parameters
    ----------
    rms, measured, medians:
        The rms per parameter, where it was measured, and the running median of the steps before (NaN
        where there is no history yet; a median of 0 says nothing about size and is not evaluated).
    limits:
        ``exploding_factor`` times its own median is too much, as long as the rms is not below
        ``vanishing_rms``; so is a total norm above ``exploding_clip_factor`` times the clip norm, which
        marks every measured parameter of that step.
    total_norm, clip_norm:
        Norm over all parameters before clipping, and the clip norm in use; NaN where there is none.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        outgrown = (medians > 0) & (rms > limits.exploding_factor * medians) & (rms >= limits.vanishing_rms)
        whole = np.asarray(total_norm > limits.exploding_clip_factor * np.asarray(clip_norm))[..., None]
    return measured & (outgrown | whole)


def health(
    measured: Bools, vanishes: Bools, explodes: Bools, finite: Bools | np.bool_ | bool, limits: ScoreLimits
) -> Floats:
    """Return ``clamp(1 - 0.5 share_vanishing - 0.8 share_exploding, 0, 1)``, over the last axis.

    0 where ``finite`` (one per step) is False, NaN where no parameter was measured. The weights are
    ``penalty_vanishing`` and ``penalty_exploding``.
    """
    count, vanishing, exploding = (
        np.sum(marks, axis=-1) for marks in (measured, vanishes & measured, explodes & measured)
    )
    return _score(count, vanishing, exploding, finite, limits)


def _score(
    measured: Integers,
    vanishing: Integers,
    exploding: Integers,
    finite: Bools | np.bool_ | bool,
    limits: ScoreLimits,
) -> Floats:
    """Return :func:`health` from numbers of parameters, one per step."""
    lost = limits.penalty_vanishing * vanishing + limits.penalty_exploding * exploding
    score = np.clip(1.0 - lost / np.maximum(measured, 1), 0.0, 1.0)
    return np.where(measured == 0, np.nan, np.where(finite, score, 0.0))


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


def health_series(run: Run, limits: ScoreLimits | None = None) -> Health:
    """Score every recorded step of a run.

    Parameters
    ----------
    run:
        A stored run; one without a gradient series gives empty arrays.
    limits:
        Limits; without them, the defaults with what the run itself recorded as overridden. What this
        release does not know of that is left out here; evaluating the run says so.
    """
    if limits is None:
        limits = with_overrides(ScoreLimits, known_overrides("health", run.overrides.get("health", {}))[0])
    if not run.has("gradient"):
        none = np.zeros(0, dtype=np.int64)
        return Health(none, np.zeros(0), none, none, none, none)
    frame = run.frame("gradient", "rms")
    ill_SP = np.asarray(run.frame("gradient", "non_finite").values > 0) & frame.measured
    measured_S, ill_S = frame.measured.sum(axis=1), ill_SP.sum(axis=1)
    rms_SP = present(frame.values, frame.measured)
    vanishing_S = _vanishing_counts(rms_SP, frame.measured, limits)
    clipped = total_norms(run, frame.steps), clip_norms(run, frame.steps)
    exploding_S = _exploding_counts(rms_SP, frame.measured, limits, *clipped)
    return Health(
        steps=frame.steps,
        score=_score(measured_S, vanishing_S, exploding_S, ill_S == 0, limits),
        measured=measured_S,
        vanishing=vanishing_S,
        exploding=exploding_S,
        non_finite=ill_S,
    )


def _vanishing_counts(rms_SP: Floats, measured_SP: Bools, limits: VanishingMaskLimits) -> Integers:
    """Count what :func:`vanishing` marks, per step; it looks only at steps with a small value."""
    counts_S = np.zeros(len(rms_SP), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        small_S = ((rms_SP < limits.vanishing_rms) | (rms_SP == 0)).any(axis=1)
    rows = np.flatnonzero(small_S)
    counts_S[rows] = vanishing(rms_SP[rows], measured_SP[rows], limits).sum(axis=1)
    return counts_S


def _exploding_counts(
    rms_SP: Floats, measured_SP: Bools, limits: ExplodingMaskLimits, total_norm_S: Floats, clip_norm_S: Floats
) -> Integers:
    """Count what :func:`exploding` marks, per step."""
    columns, medians_SC = outrun(rms_SP, limits)
    own_S = exploding(rms_SP[:, columns], measured_SP[:, columns], medians_SC, limits).sum(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        whole_S = total_norm_S > limits.exploding_clip_factor * clip_norm_S
    return np.asarray(np.where(whole_S, measured_SP.sum(axis=1), own_S))


def rounding_floor(values_SP: Floats) -> Floats:
    """Return the value below which the ones of each row may be rounding error, of shape [S].

    It is a share of the median over the positive values of the row, NaN where there are none. A ratio is no
    measurement if what is divided, or what it is divided by, lies below.
    """
    return ROUNDING_SHARE * finite_median(np.where(values_SP > 0, values_SP, np.nan))


def outrun(rms_SP: Floats, limits: ExplodingMaskLimits) -> tuple[Integers, Floats]:
    """Return the columns that may explode against their own past, and the running medians of each [S, C].

    A median is NaN where it, or the value that is compared with it, may be rounding error.
    """
    columns, medians_SC = medians_outrun(
        rms_SP, limits.history_window, limits.history_refresh, limits.history_minimum, limits.exploding_factor
    )
    with np.errstate(invalid="ignore"):
        hits_SC = rms_SP[:, columns] > limits.exploding_factor * medians_SC
    rows = np.flatnonzero(hits_SC.any(axis=1))
    if not len(rows):
        return columns, medians_SC
    floors_S = np.full(len(rms_SP), np.nan)
    spans = [np.arange(max(0, row - limits.history_window), row + 1) for row in rows.tolist()]
    rows_of = np.unique(np.concatenate(spans))
    floors_S[rows_of] = rounding_floor(rms_SP[rows_of])
    for row in rows.tolist():
        low = max(0, row - limits.history_window)
        with np.errstate(invalid="ignore"):
            is_rounding = (medians_SC[row] < finite_median(floors_S[low:row])) | (
                rms_SP[row, columns] < floors_S[row]
            )
        medians_SC[row, is_rounding] = np.nan
    return columns, medians_SC


def total_norms(run: Run, steps_S: Integers) -> Floats:
    """Return the L2 norm over all parameters at ``steps_S``: as recorded, else from the gradient series.

    A step at which nothing was measured, or only a part of what others have, is NaN unless recorded.
    """
    recorded = run.scalar("total_norm")
    norms_S = at_steps(steps_S, recorded.steps, recorded.values)
    recorded_S = np.isin(steps_S, recorded.steps)
    if recorded_S.all() or not run.has("gradient"):
        return norms_S
    frame = run.frame("gradient", "norm")
    present_S = frame.measured.sum(axis=1)
    whole_S = present_S == (present_S.max() if len(present_S) else 0)
    with np.errstate(over="ignore"):
        sums_S = np.sqrt(np.sum(np.where(frame.measured, frame.values, 0.0) ** 2, axis=1))
    joined_S = at_steps(steps_S, frame.steps, np.where(whole_S & (present_S > 0), sums_S, np.nan))
    return np.where(recorded_S, norms_S, joined_S)


def clip_norms(run: Run, steps_S: Integers) -> Floats:
    """Return the clip norm in use at ``steps_S``; NaN where gradients were not clipped by norm."""
    seen, limit = run.scalar("clip/norm"), run.scalar("clip/limit")
    by_norm_S = np.isin(steps_S, seen.steps)
    return np.where(by_norm_S, at_steps(steps_S, limit.steps, limit.values), np.nan)


def skipped_steps(run: Run) -> frozenset[int]:
    """Return the steps that a gradient scaler skipped, so that their gradients moved nothing."""
    skipped = run.scalar("scaler/skipped")
    return frozenset(int(step) for step in skipped.steps[skipped.values > 0])


# By what factor clipping scales the gradient at each step.


def clip_factors(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps at which clipping was called, and by what factor it scales the gradient at each.

    The norm that clipping computes is known at every step, the factor at those that were recorded: between
    them the clip norm that was recorded last holds.
    """
    factor, norm, limit = (run.scalar(f"clip/{name}") for name in ("factor", "norm", "limit"))
    steps, values = factor.steps, factor.values
    if len(norm.steps) > len(steps) and len(limit.steps):
        rows = np.maximum(np.searchsorted(limit.steps, norm.steps, "right") - 1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps, values = norm.steps, np.minimum(limit.values[rows] / norm.values, 1.0)
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]
