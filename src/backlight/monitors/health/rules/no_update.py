"""Rule ``no_update``: a gradient is there, and the weight does not move, or hardly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import limit
from backlight.findings.losses import losses_of
from backlight.findings.phrases import optimizer_name
from backlight.findings.recorded_steps import after_share, step_weights, weighted_median
from backlight.monitors.health.model.history import Bools, Integers, at_steps, ending_streaks, finite_median
from backlight.monitors.health.model.parameters import (
    MembershipLimits,
    stale_evidence,
    stale_parameters,
    without_optimizer,
)
from backlight.monitors.health.model.score import RmsLimits, skipped_steps
from backlight.records import Evidence, Finding, ParameterRecord, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run, Scalar
from backlight.text import count

SPARSE = 0.9
"""Share of zeros in a gradient above which a sample of the weights may miss those that moved."""

_HALF = frozenset({"float16", "bfloat16"})

MOSTLY = 0.9
"""Share of the compared steps from which on ``weights_unchanged`` reports that they are rounded away."""

FP32_SPACING = 2.0**-23
"""Largest distance between neighbouring fp32 numbers, as a share of their size."""


@dataclass(frozen=True)
class NoUpdateLimits(RmsLimits, MembershipLimits):
    """Limits of the rule ``no_update``."""

    no_update_window: int = limit(
        10,
        "recorded steps up to the end without any change of the weight; a warm-up may begin at rate 0",
        low=1,
    )
    slow_update: float = limit(
        1e-6,
        "median update-to-weight ratio of the matrices that no step of the run reaches where the rate is too "
        "low; 1e-3 is usual, and fine-tuning at a rate of 1e-6 has 2e-5",
    )
    slow_moved: float = limit(
        1e-3, "sum of those ratios over all steps: the largest part by which the weights can have changed"
    )
    slow_steps: int = limit(10, "recorded updates that this needs", low=1)
    slow_loss: float = limit(
        0.1, "share by which the loss of the run must not have fallen: then such updates are enough", high=1.0
    )


@rule(
    "no_update", monitor="health", version=2, limits=NoUpdateLimits, needs=("gradient",),
    explained_by=("always_clipped", "large_update", "schedule"),
)  # fmt: skip
def no_update(run: Run, limits: NoUpdateLimits) -> Iterator[Finding]:
    """Find weights that did not change up to the end, one finding per cause: no optimizer, rate 0, other.

    Where none of it holds, find a learning rate that is too low to change any weight.
    """
    records = {p.name: p for p in run.parameters()}
    stale = stale_parameters(run)
    # An optimizer with parameters of no module confirms the cause, so that fewer steps suffice.
    without = without_optimizer(run, limits.no_gradient_steps if stale else limits.no_update_window)
    streaks = {n: k for n, k in _still(run, records, limits).items() if records[n] not in without}
    still = [records[name] for name, streak in streaks.items() if streak >= limits.no_update_window]
    moved = len(streaks) - len(still)
    is_known = any(_contradictions(run, "trained_tensors", kind) for kind in ("replaced", "left_out"))
    if without and not is_known:
        yield _outside(run, without, stale, sum(p.in_model for p in records.values()))
    elif not still and not _are_rounded(run) and (slow := _too_slow(run, limits)) is not None:
        yield slow
    zero_rate = [p for p in still if _last_rate(run, p) == 0.0]
    for group, at_zero in ((zero_rate, True), ([p for p in still if p not in zero_rate], False)):
        # That rule leaves out groups at rate 0, and knows why the others do not move.
        is_known = not at_zero and _contradictions(run, "weights_unchanged") >= limits.no_gradient_steps
        if group and not is_known:
            yield _standing(run, group, streaks, at_zero, everything=moved == 0)


def _still(run: Run, records: dict[str, ParameterRecord], limits: NoUpdateLimits) -> dict[str, int]:
    """Return, per parameter with a measured update, how many recorded steps up to the end had none.

    A step is evidence if no scaler skipped it, the rms of the gradient is at least ``vanishing_rms``, and a
    plain gradient step would change an fp32 weight of that size. The gradient of a bias before a batch norm
    is the rounding error of a sum that is zero: its step is lost, and nothing is wrong. Where no weight at
    all moved, a step that is lost is evidence too: the learning rate is too small.
    """
    if not run.has("update"):
        return {}
    update, sampled = run.frame("update", "update_norm"), run.frame("update", "sampled")
    rms, zeros = run.frame("gradient", "rms"), run.frame("gradient", "zero_share")
    steps, rows_u, rows_g = np.intersect1d(update.steps, rms.steps, return_indices=True)
    taken = ~np.isin(steps, list(skipped_steps(run)))
    rows_u, rows_g = rows_u[taken], rows_g[taken]
    numel, weight = run.frame("update", "numel"), run.frame("update", "weight_norm")
    updated = [records.get(name) for name in update.names]
    rates = {group: _rates(run, group, update.steps) for group in {p.group for p in updated if p}}
    half_P = np.array([p is not None and p.dtype in _HALF for p in updated], dtype=bool)
    some_S = np.asarray(np.any(update.measured & (update.values > 0), axis=1), dtype=np.bool_)

    def marks(rows: slice, columns: Integers) -> tuple[Bools, Bools]:
        at_u, at_g = np.ix_(rows_u[rows], columns), np.ix_(rows_g[rows], columns)
        sure = (sampled.values[at_u] == numel.values[at_u]) | (zeros.values[at_g] < SPARSE)
        large = rms.values[at_g] >= limits.vanishing_rms
        absent = np.full(len(update.steps), np.nan)
        rate = np.stack([rates[p.group] if (p := updated[c]) else absent for c in columns], axis=1)[
            rows_u[rows]
        ]
        with np.errstate(invalid="ignore", divide="ignore"):
            spacing = FP32_SPACING * weight.values[at_u] / np.sqrt(np.maximum(numel.values[at_u], 1))
            lost = (rate > 0) & (rate * rms.values[at_g] < spacing / 2) & ~half_P[columns]
        lost &= some_S[rows_u[rows]][:, None]
        evaluated = update.measured[at_u] & rms.measured[at_g] & large & sure & ~lost
        return evaluated & (update.values[at_u] == 0), evaluated

    streaks_P, ever_P = ending_streaks(marks, len(rows_u), len(update.names), limits.no_update_window)
    return {name: int(streaks_P[i]) for i, name in enumerate(update.names) if ever_P[i] and name in records}


def _are_rounded(run: Run) -> bool:
    """Return whether nearly all steps that were compared are rounded away, which has a rule of its own."""
    facts = [e.payload for e in run.events("contradiction") if e.payload.get("rule") == "weights_unchanged"]
    return len(facts) >= MOSTLY * max((int(fact.get("comparisons") or 0) for fact in facts), default=1)


def _too_slow(run: Run, limits: NoUpdateLimits) -> Finding | None:
    """Return the finding where no step of the run changes the weights by more than a millionth.

    The largest ratio counts, so that a warm-up from 0 or a decay to 0 is none.
    """
    if not run.has("update"):
        return None
    frame = run.frame("update", "ratio")
    matrices = [p for p in run.parameters() if len(p.shape) >= 2 and p.group]
    columns = np.array([frame.names.index(p.name) for p in matrices], dtype=np.int64)
    usable = frame.measured[:, columns] & np.isfinite(frame.values[:, columns])
    rows = np.flatnonzero(usable.any(axis=1))
    if len(rows) < limits.slow_steps:
        return None
    ratios = finite_median(np.where(usable[rows], frame.values[np.ix_(rows, columns)], np.nan))
    moved = float((ratios * step_weights(frame.steps[rows])).sum())
    has_fallen = any(_falls(loss, limits) for loss in losses_of(run).values())
    if not 0 < ratios.max() < limits.slow_update or moved >= limits.slow_moved or has_fallen:
        return None
    row = int(rows[np.argmax(ratios)])
    largest = max(matrices, key=lambda p: p.numel)
    rate = run.scalar(f"lr/{largest.group}")
    peak = int(np.argmax(rate.values)) if len(rate.values) else None
    ratio, step = phrases.number(ratios.max()), int(frame.steps[row])
    value = float(frame.values[row, frame.names.index(largest.name)])
    return Finding(
        severity=Severity.WARNING,
        title=(
            f"A step changes the weights by {ratio} of their size at most"
            if peak is None
            else f"The learning rate of {phrases.number(rate.values[peak])} is too low to change the weights"
        ),
        detail=(
            f"The largest update-to-weight ratio of {len(rows)} recorded updates is {ratio} (step {step}, "
            f"median over {count(len(matrices), 'weight matrix', 'weight matrices')}); about 0.001 is usual. "
            f"All steps together can have changed the weights by {phrases.number(moved)} of their size."
        ),
        subject=Subject(parameter=largest.name, step=int(frame.steps[rows[0]])),
        evidence=(
            phrases.series("update/ratio", largest.name, step, value, "1"),
            *(
                phrases.scalar(f"lr/{largest.group}", int(rate.steps[peak]), float(rate.values[peak]))
                for peak in [peak]
                if peak is not None
            ),
        ),
        fix="Raise the learning rate a thousandfold, or look for a schedule or a unit that made it so small.",
        refuted_if="the loss falls as fast as at a rate a hundred times higher.",
    )


def _falls(loss: Scalar, limits: NoUpdateLimits) -> bool:
    """Return whether a loss at the end of the run is clearly below that at its start."""
    is_finite = np.isfinite(loss.values)
    steps, values = loss.steps[is_finite], loss.values[is_finite]
    if len(values) < 2 or values.min() < 0:
        return False
    early, late = after_share(steps, 0.1), after_share(steps, 0.9)
    first = weighted_median(values[: max(early, 1)], step_weights(steps[: max(early, 1)]))
    last = weighted_median(values[late:], step_weights(steps[late:]))
    return last < (1 - limits.slow_loss) * first


def _rates(run: Run, group: str, steps: Integers) -> NDArray[np.float64]:
    rate = run.scalar(f"lr/{group}")
    return at_steps(steps, rate.steps, rate.values)


def _last_rate(run: Run, record: ParameterRecord) -> float | None:
    rate = run.scalar(f"lr/{record.group}")
    return float(rate.values[-1]) if len(rate.values) else None


def _contradictions(run: Run, rule_name: str, kind: str = "") -> int:
    """Return how many facts there are for a rule of ``correctness``, which knows the cause."""
    payloads = [event.payload for event in run.events("contradiction")]
    return sum(fact.get("rule") == rule_name and kind in {"", fact.get("kind")} for fact in payloads)


def _outside(run: Run, group: list[ParameterRecord], stale: list[ParameterRecord], whole: int) -> Finding:
    order = phrases.loudest(group, lambda p: p.numel)
    worst = order[0]
    frame = run.frame("gradient", "norm")
    column = frame.names.index(worst.name)
    last = int(np.flatnonzero(frame.measured[:, column])[-1])
    first = int(frame.steps[np.flatnonzero(frame.measured[:, column])[0]])
    named = phrases.parameters([p.name for p in order], len(group))
    stale_note = (
        f" An optimizer holds {count(len(stale), 'parameter')} that no module of the model holds "
        "and that never received a gradient, as when a module is replaced after the optimizer was created."
        if stale
        else ""
    )
    return Finding(
        severity=Severity.WARNING,
        title=f"{named} {'is' if len(group) == 1 else 'are'} not in any optimizer",
        detail=(
            f"{named} "
            f"{'receives gradients but belongs' if len(group) == 1 else 'receive gradients but belong'} to "
            f"no watched optimizer, so {'it is' if len(group) == 1 else 'they are'} never updated. Affected: "
            f"{phrases.share(len(group), whole, 'parameters')}.{stale_note}"
        ),
        subject=Subject(parameter=worst.name, module=worst.module or None, step=first),
        evidence=(
            phrases.series(
                "gradient/norm", worst.name, int(frame.steps[last]), float(frame.values[last, column])
            ),
            *(Evidence(f"parameters/group/{p.name}", None, "none", "1") for p in order),
            *(stale_evidence(run, stale) if stale else ()),
        ),
        fix=(
            "Create the optimizer after the model is final and on its device: `optimizer = "
            "torch.optim.AdamW(model.parameters())`. A module that is replaced, copied or rebuilt later has "
            "new parameters."
        ),
        refuted_if="an optimizer that is not watched, or the script itself, updates these weights.",
    )


def _last_still(frame: Frame, name: str) -> int:
    """Return the last step at which the measured update of a parameter was zero."""
    column = frame.names.index(name)
    return int(frame.steps[np.flatnonzero(frame.measured[:, column] & (frame.values[:, column] == 0))[-1]])


def _too_small(run: Run, record: ParameterRecord, step: int) -> tuple[float, float] | None:
    """Return the learning rate and the spacing of fp32 where no step of that rate can change the weights.

    A step is the rate times the gradient, or about the rate with Adam: the larger of both is compared.
    """
    rate, rms = run.scalar(f"lr/{record.group}"), run.frame("gradient", "rms")
    weight, numel = run.frame("update", "weight_norm"), run.frame("update", "numel")
    at_rate, at_weight = np.flatnonzero(rate.steps == step), np.flatnonzero(weight.steps == step)
    at_rms = np.flatnonzero(rms.steps == step)
    if not (len(at_rate) and len(at_weight) and len(at_rms)):
        return None
    column = weight.names.index(record.name)
    size = float(weight.values[at_weight[0], column]) / float(
        np.sqrt(max(numel.values[at_weight[0], column], 1))
    )
    value, gradient = (
        float(rate.values[at_rate[0]]),
        float(rms.values[at_rms[0], rms.names.index(record.name)]),
    )
    spacing = FP32_SPACING * size
    return (value, spacing) if value * max(1.0, gradient) < spacing / 2 else None


def _standing(
    run: Run, group: list[ParameterRecord], streaks: dict[str, int], at_zero: bool, everything: bool
) -> Finding:
    order = phrases.loudest(group, lambda p: p.numel)
    worst = order[0]
    frame, norm = run.frame("update", "update_norm"), run.frame("gradient", "norm")
    lasts = {p.name: _last_still(frame, p.name) for p in order}
    last = lasts[worst.name]
    grads = norm.values[np.isin(norm.steps, frame.steps), norm.names.index(worst.name)]
    rate = run.scalar(f"lr/{worst.group}")
    at_last = np.flatnonzero(rate.steps == last)
    stated = f"is {phrases.number(rate.values[at_last[0]])}" if len(at_last) else "is not known"
    if at_zero:
        optimizer, _, place = worst.group.partition("/")
        cause = f"The learning rate of its group ({optimizer_name(run, int(optimizer))}, group {place}) is 0"
        check = "Print the learning rate of the schedule: a warm-up or decay may count epochs as steps."
    elif worst.dtype in _HALF:
        cause = (
            f"The learning rate {stated}; the weight is {worst.dtype}, which rounds away a step below half "
            "the spacing of its values"
        )
        check = (
            "Keep the weights in fp32 (autocast, or a master copy in the optimizer), or raise the learning "
            "rate."
        )
    elif (lost := _too_small(run, worst, last)) is not None:
        rate_is, spacing = lost
        cause = (
            f"The learning rate {phrases.number(rate_is)} is the cause: a step of that size is below half "
            f"the spacing of fp32 at the size of these weights, {phrases.number(spacing / 2)}"
        )
        check = "Raise the learning rate, and look for a schedule or a unit that made it so small."
    else:
        cause = f"The learning rate {stated}" + ("; a rate of 0 is not the cause" if len(at_last) else "")
        check = (
            "Compare the `id()` of the parameters in the optimizer with those of the model. The optimizer "
            "may hold a copy, the weights may be restored after each step, or the rate may be below the "
            "spacing of fp32."
        )
    named = phrases.parameters([p.name for p in order], len(group))
    who = (
        "No weight is updated"
        if everything and len(group) == len(streaks)
        else f"{named} {'is' if len(group) == 1 else 'are'} not updated"
    )
    return Finding(
        severity=Severity.ERROR if everything else Severity.WARNING,
        title=f"{who} despite a non-zero gradient",
        detail=(
            f"The update of `{worst.name}` is exactly 0 in the last {streaks[worst.name]} recorded steps, "
            f"while its median gradient norm is {phrases.number(float(finite_median(grads)))}. {cause}."
        ),
        subject=Subject(parameter=worst.name, module=worst.module or None, step=last),
        evidence=(
            *(phrases.series("update/update_norm", p.name, lasts[p.name], 0.0, "weight") for p in order),
            *(phrases.scalar(f"lr/{worst.group}", last, float(rate.values[i])) for i in at_last),
        ),
        fix=check,
        refuted_if=(
            f"`{worst.name}` differs between two checkpoints of these steps (only the sampled values did not "
            "change)."
        ),
    )
