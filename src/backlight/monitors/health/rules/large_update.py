"""Rule ``large_update``: steps that replace a large part of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.findings.losses import loss_name
from backlight.findings.phrases import SCALE_FREE, optimizer_kinds
from backlight.findings.recorded_steps import after_share, step_weights, weighted_median
from backlight.monitors.health.model.history import Bools, Integers, finite_median
from backlight.monitors.health.model.score import rounding_floor
from backlight.records import Evidence, Finding, ParameterRecord, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run

ZERO_RMS = 1e-5
"""A weight whose rms is below this before its first recorded step counts as started at zero."""

SMALL_START = 0.1
"""A weight that starts below this share of torch's default, 1 / sqrt(3 fan_in), is small on purpose."""

RISEN = 1.5
"""Times its value before the weights blew up that a loss must reach to have risen."""

LEARNED = 0.9
"""Share of that value below which a loss must end to have fallen."""


@dataclass(frozen=True)
class UpdateLimits(Limits, monitor="health"):
    """Limits of the rule ``large_update``."""

    update_ratio: float = limit(
        0.1,
        "norm of the step over norm of the weight; 1e-3 is usual, at 0.1 a weight is replaced in ten steps",
        source="the rule of thumb of 1e-3 is from Karpathy's CS231n notes; the factor of 100 is chosen",
    )
    update_ratio_once: float = limit(
        1.0,
        "median of that ratio over the weight matrices in any one step, also the first: the step is as long "
        "as the weight; Adam at its usual rates stays below 0.2",
    )
    update_steps: int = limit(20, "last recorded steps at which the ratio is evaluated", low=1)
    update_share: float = limit(
        0.9, "share of those steps at which the ratio must exceed the limit", high=1.0
    )
    update_growth: float = limit(
        5.0,
        "median over the weight matrices of how many times their norm grows within update_growth_steps: a "
        "rate far too high, whether it is reached at once or by a warm-up",
        low=1.0,
    )
    update_growth_steps: int = limit(
        20, "steps of the training within which that growth must occur; trained weights take hundreds", low=1
    )
    update_settle: int = limit(
        30, "first steps of the training left out: optimizers start with their largest steps", low=0
    )
    update_settle_zero: int = limit(
        120,
        "the same for weights that start at zero: theirs is a ratio of 1/t, or 1/sqrt(t) where gradients "
        "are noise, which falls below 0.1 after 100 steps",
        source="random walk from zero: the norm after t steps is sqrt(t) times one step",
        low=0,
    )


@rule(
    "large_update", monitor="health", limits=UpdateLimits, needs=("update",), is_statistic=True,
    explained_by=("gradients_not_cleared", "clipping", "mixed_precision", "weights_changed"),
)  # fmt: skip
def large_update(run: Run, limits: UpdateLimits) -> Iterator[Finding]:
    """Find steps that overwrite the weights or blow them up, else matrices whose updates stay large.

    The first two are how a rate far too high looks under Adam: after its first steps the ratio of step to
    weight is ordinary again. Vectors are left out: a bias starts at zero, and a ratio to nearly nothing says
    nothing.
    """
    frame, weight = run.frame("update", "ratio"), run.frame("update", "weight_norm")
    matrices = _matrices(run, frame, weight)
    usable_SP = frame.measured & np.isfinite(frame.values)
    columns = np.array([c for c, (record, start) in matrices.items() if start >= _small(record)], dtype=int)
    if len(columns) > 1:  # the median of one is no median
        for find in (_once, _grown):
            if (finding := find(run, frame, weight, columns, usable_SP, limits)) is not None:
                yield finding
                return
    since_S = frame.steps - frame.steps[0] if len(frame.steps) else frame.steps
    ratios_of: dict[int, float] = {}
    evaluated = 0
    for column, (record, start) in matrices.items():
        settle = limits.update_settle_zero if start < ZERO_RMS else limits.update_settle
        rows = np.flatnonzero(usable_SP[:, column] & (since_S >= settle))[-limits.update_steps :]
        if len(rows) < limits.update_steps:
            continue
        evaluated += 1
        ratios = frame.values[rows, column]
        is_large = np.mean(ratios > limits.update_ratio) >= limits.update_share
        if is_large and not _is_rounding(weight, matrices, record, column, rows):
            ratios_of[column] = float(np.median(ratios))
    if ratios_of:
        yield _lasting(
            run, frame, {c: record for c, (record, _) in matrices.items()}, ratios_of, evaluated, limits
        )


def _is_rounding(
    weight: Frame,
    matrices: dict[int, tuple[ParameterRecord, float]],
    record: ParameterRecord,
    column: int,
    rows: Integers,
) -> bool:
    """Return whether a weight has shrunk to nothing next to the others: a ratio to it is no measurement."""
    columns = np.array(list(matrices))
    sizes = np.sqrt([max(other.numel, 1) for other, _ in matrices.values()])
    floors = rounding_floor(weight.values[np.ix_(rows, columns)] / sizes)
    return bool(np.median(weight.values[rows, column] / record.numel**0.5 - floors) < 0)


def _small(record: ParameterRecord) -> float:
    """Return the rms below which a matrix starts small on purpose."""
    return float(SMALL_START / np.sqrt(3 * record.numel / record.shape[0]))


def _matrices(run: Run, frame: Frame, weight: Frame) -> dict[int, tuple[ParameterRecord, float]]:
    """Return the measured weight matrices by column, and the rms that each started with."""
    matrices = {}
    for record in run.parameters():
        column = frame.names.index(record.name)
        rows = np.flatnonzero(frame.measured[:, column])
        if len(record.shape) >= 2 and len(rows):
            first = float(weight.values[rows[0], column]) / record.numel**0.5
            matrices[column] = (record, first)
    return matrices


def _rate(run: Run, record: ParameterRecord, step: int) -> tuple[str, list[Evidence]]:
    """Return the learning rate at a step as words and as evidence; empty where it is not known."""
    rate = run.scalar(f"lr/{record.group}")
    place = np.flatnonzero(rate.steps == step)
    if len(place) == 0:
        return "", []
    value = float(rate.values[place[0]])
    words = f" at a learning rate of {phrases.number(value)}"
    return words, [phrases.scalar(f"lr/{record.group}", step, value)]


def _lasting(
    run: Run,
    frame: Frame,
    records: dict[int, ParameterRecord],
    medians: dict[int, float],
    evaluated: int,
    limits: UpdateLimits,
) -> Finding:
    order = phrases.loudest(medians, lambda c: medians[c])
    worst = order[0]
    record = records[worst]
    last = int(np.flatnonzero(frame.measured[:, worst])[-1])
    step = int(frame.steps[last])
    stated, evidence = _rate(run, record, step)
    return Finding(
        severity=Severity.WARNING,
        title=(
            f"Updates of {phrases.parameters([records[c].name for c in order], len(medians))} are "
            f"{phrases.number(medians[worst])} of the weight"
        ),
        detail=(
            f"The median update-to-weight ratio of `{record.name}` over the last {limits.update_steps} "
            f"recorded steps is {phrases.number(medians[worst])}{stated}; about 0.001 is usual. Affected: "
            f"{phrases.share(len(medians), evaluated, 'weight matrices')}."
        ),
        subject=Subject(parameter=record.name, module=record.module or None, step=step),
        evidence=(
            *(
                phrases.series("update/ratio", records[c].name, step, frame.values[last, c], "1")
                for c in order
            ),
            *evidence,
        ),
        fix="Divide the learning rate by ten in a short run and compare the loss at the same step.",
        refuted_if=(
            "the loss falls faster at this rate than at a tenth of the learning rate, or the weight is small "
            "by design (strong weight decay, an adapter that starts at zero)."
        ),
    )


def _once(
    run: Run, frame: Frame, _weight: Frame, columns: Integers, usable_SP: Bools, limits: UpdateLimits
) -> Finding | None:
    """Return the finding where a single step is as long as the weights."""
    # A median above the limit takes values above it.
    rows = np.flatnonzero((usable_SP & (frame.values > limits.update_ratio_once)).any(axis=1))
    part = np.ix_(rows, columns)
    medians = finite_median(np.where(usable_SP[part], frame.values[part], np.nan), minimum=2)
    rows, medians = rows[medians > limits.update_ratio_once], medians[medians > limits.update_ratio_once]
    if not len(rows):
        return None
    row, size = int(rows[0]), float(medians[0])
    step = int(frame.steps[row])
    present = [int(c) for c in columns if usable_SP[row, c]]
    order = phrases.loudest(present, lambda c: float(frame.values[row, c]))
    record = next(p for p in run.parameters() if p.name == frame.names[order[0]])
    stated, evidence = _rate(run, record, step)
    often = f" This happened at {len(rows)} recorded steps." if len(rows) > 1 else ""
    shown = [phrases.series("update/ratio", frame.names[c], step, frame.values[row, c], "1") for c in order]
    return _too_high(
        run, record, (step, step), f"step {step} overwrote the weights",
        f"The update-to-weight ratio of step {step} is {phrases.number(size)} in the median over "
        f"{len(present)} weight matrices{stated}, and {phrases.number(frame.values[row, order[0]])} in "
        f"`{record.name}`. The initialisation is lost.{often}",
        [*shown, *evidence],
    )  # fmt: skip


def _grown(
    run: Run, frame: Frame, weight: Frame, columns: Integers, usable_SP: Bools, limits: UpdateLimits
) -> Finding | None:
    """Return the finding where the weights grow several times within a few steps, and nothing is learned.

    The weights of a small network may have to grow: a loss that falls refutes it.
    """
    large_S = (usable_SP[:, columns] & (frame.values[:, columns] > limits.update_ratio)).sum(axis=1)
    if not (large_S > len(columns) / 2).any():
        return None
    rows = np.flatnonzero(weight.measured[:, columns].all(axis=1))
    steps, norms = weight.steps[rows], weight.values[np.ix_(rows, columns)]
    bases = np.searchsorted(steps, steps - limits.update_growth_steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = finite_median(norms / norms[bases], minimum=2)
    fast = np.flatnonzero(growth > limits.update_growth)
    if not len(fast):
        return None
    base = int(bases[fast[0]])
    last = int(fast[bases[fast] == base][-1])
    first_step, step = int(steps[base]), int(steps[last])
    order = phrases.loudest(range(len(columns)), lambda c: float(norms[last, c] / norms[base, c]))
    names = [weight.names[int(columns[c])] for c in order]
    record = next(p for p in run.parameters() if p.name == names[0])
    if (after := _loss_after(run, first_step, record.group)) is None or after.is_learned:
        return None
    _, evidence = _rate(run, record, step)
    for at, row in ((first_step, base), (step, last)):
        evidence.append(phrases.series("update/weight_norm", names[0], at, norms[row, order[0]], "weight"))
    return _too_high(
        run, record, (first_step, step),
        f"weights grew {phrases.number(growth[last])}-fold in {step - first_step} steps",
        f"Between steps {first_step} and {step} the norms of {len(columns)} weight matrices grew "
        f"{phrases.number(growth[last])} times in the median; that of `{names[0]}` grew from "
        f"{phrases.number(norms[base, order[0]])} to {phrases.number(norms[last, order[0]])}.",
        evidence,
    )  # fmt: skip


def _too_high(
    run: Run,
    record: ParameterRecord,
    between: tuple[int, int],
    effect: str,
    detail: str,
    evidence: list[Evidence],
) -> Finding:
    """Return a finding on a rate that is too high, by its ``effect``; an error where the loss stays above."""
    rate = run.scalar(f"lr/{record.group}")
    rates = rate.values[(rate.steps >= between[0]) & (rate.steps <= between[1])]
    # Later, a step of SGD may be as long because the gradient is large.
    is_cause = between[0] <= UpdateLimits.update_growth_steps or not set(optimizer_kinds(run)) - SCALE_FREE
    named = len(rates) and is_cause
    cause = f"The learning rate of {phrases.number(max(rates))} is too high: " if named else ""
    title, after = f"{cause}{effect}", _loss_after(run, between[0], record.group)
    if after is not None and after.has_risen:
        detail += (
            f" The loss rose from {phrases.number(after.first)} to {phrases.number(after.peak)} (step "
            f"{after.peak_step}) and ended at {phrases.number(after.last)}."
        )
        evidence.append(phrases.scalar(after.name, after.peak_step, after.peak, "loss"))
    is_broken = after is not None and after.has_risen and after.last >= LEARNED * after.first
    return Finding(
        severity=Severity.ERROR if is_broken else Severity.WARNING,
        title=title[0].upper() + title[1:],
        detail=detail,
        subject=Subject(parameter=record.name, module=record.module or None, step=between[0]),
        evidence=tuple(evidence),
        fix="Restart with a tenth of the learning rate; if that loss falls at once, raise it with a warm-up.",
        refuted_if="the weights were tiny on purpose, so that overwriting them loses little.",
    )


@dataclass(frozen=True)
class _LossAfter:
    """The loss from a step on: its first value, its peak with the step, and the median of its last tenth."""

    name: str
    first: float
    peak: float
    peak_step: int
    last: float

    @property
    def has_risen(self) -> bool:
        """Whether the peak is far above the first value."""
        return self.peak > RISEN * self.first

    @property
    def is_learned(self) -> bool:
        """Whether it fell, and never rose far: whatever the weights did, they learned."""
        return not self.has_risen and self.last < LEARNED * self.first


def _loss_after(run: Run, step: int, group: str) -> _LossAfter | None:
    """Return the loss of ``group`` from ``step`` on; None without one, or of both signs: that has no size."""
    name = loss_name(run, group)
    loss = run.scalar(name)
    after = np.isfinite(loss.values) & (loss.steps >= step)
    steps, values = loss.steps[after], loss.values[after]
    if not len(values) or values.min() < 0:
        return None
    peak, settled = int(np.argmax(values)), after_share(steps, 0.9)
    last = weighted_median(values[settled:], step_weights(steps[settled:]))
    return _LossAfter(name, float(values[0]), float(values[peak]), int(steps[peak]), last)
