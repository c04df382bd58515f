"""Rule ``large_update``: steps that replace a large part of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.health.model.history import finite_median
from backlight.records import Evidence, Finding, ParameterRecord, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run

ZERO_RMS = 1e-5
"""A weight whose rms is below this before its first recorded step counts as started at zero."""

SMALL_START = 0.1
"""A weight that starts below this share of torch's default, 1 / sqrt(3 fan_in), is small on purpose."""


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


@rule("large_update", monitor="health", limits=UpdateLimits, needs=("update",))
def large_update(run: Run, limits: UpdateLimits) -> Iterator[Finding]:
    """Find matrices whose ratio of step to weight stays large, else a step as long as the weights.

    The second is how a rate far too high looks under Adam: the first steps blow the weights up, after
    which the ratio is ordinary again. Vectors are left out: a bias starts at zero, and a ratio to nearly
    nothing says nothing.
    """
    frame = run.frame("update", "ratio")
    matrices = _matrices(run, frame)
    usable_SP = frame.measured & np.isfinite(frame.values)
    since_S = frame.steps - frame.steps[0] if len(frame.steps) else frame.steps
    found: dict[int, float] = {}
    evaluated = 0
    for column, (_, start) in matrices.items():
        settle = limits.update_settle_zero if start < ZERO_RMS else limits.update_settle
        rows = np.flatnonzero(usable_SP[:, column] & (since_S >= settle))
        if len(rows) < limits.update_steps:
            continue
        evaluated += 1
        ratios = frame.values[rows[-limits.update_steps :], column]
        if np.mean(ratios > limits.update_ratio) >= limits.update_share:
            found[column] = float(np.median(ratios))
    if found:
        yield _lasting(
            run, frame, {c: record for c, (record, _) in matrices.items()}, found, evaluated, limits
        )
        return
    columns = [column for column, (record, start) in matrices.items() if start >= _small(record)]
    if len(columns) < 2:  # the median of one is no median
        return
    # A median above the limit takes values above it.
    some = np.flatnonzero((usable_SP & (frame.values > limits.update_ratio_once)).any(axis=1))
    part = np.ix_(some, np.array(columns))
    medians_S = np.full(len(frame.steps), np.nan)
    medians_S[some] = finite_median(np.where(usable_SP[part], frame.values[part], np.nan), minimum=2)
    rows = np.flatnonzero(medians_S > limits.update_ratio_once)
    if len(rows):
        yield _once(run, frame, columns, medians_S, int(rows[0]), len(rows))


def _small(record: ParameterRecord) -> float:
    """Return the rms below which a matrix starts small on purpose."""
    return float(SMALL_START / np.sqrt(3 * record.numel / record.shape[0]))


def _matrices(run: Run, frame: Frame) -> dict[int, tuple[ParameterRecord, float]]:
    """Return the measured weight matrices by column, and the rms that each started with."""
    weight = run.frame("update", "weight_norm")
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
    found: dict[int, float],
    evaluated: int,
    limits: UpdateLimits,
) -> Finding:
    order = phrases.loudest(found, lambda c: found[c])
    worst = order[0]
    record = records[worst]
    last = int(np.flatnonzero(frame.measured[:, worst])[-1])
    step = int(frame.steps[last])
    stated, evidence = _rate(run, record, step)
    return Finding(
        severity=Severity.WARNING,
        title=(
            f"Updates of {phrases.parameters([records[c].name for c in order], len(found))} are "
            f"{phrases.number(found[worst])} of the weight"
        ),
        detail=(
            f"The median update-to-weight ratio of `{record.name}` over the last {limits.update_steps} "
            f"recorded steps is {phrases.number(found[worst])}{stated}; about 0.001 is usual. Affected: "
            f"{phrases.share(len(found), evaluated, 'weight matrices')}."
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


def _once(run: Run, frame: Frame, columns: list[int], medians_S: np.ndarray, row: int, count: int) -> Finding:
    step = int(frame.steps[row])
    present = [c for c in columns if np.isfinite(frame.values[row, c]) and frame.measured[row, c]]
    order = phrases.loudest(present, lambda c: float(frame.values[row, c]))
    record = next(p for p in run.parameters() if p.name == frame.names[order[0]])
    stated, evidence = _rate(run, record, step)
    often = f" This happened at {count} recorded steps." if count > 1 else ""
    return Finding(
        severity=Severity.WARNING,
        title=(
            f"Step {step} overwrote the weights (update-to-weight ratio "
            f"{phrases.number(float(medians_S[row]))})"
        ),
        detail=(
            f"The median over {len(present)} weight matrices is "
            f"{phrases.number(float(medians_S[row]))}{stated}, the largest "
            f"{phrases.number(float(frame.values[row, order[0]]))} in `{record.name}`. The initialisation is "
            f"lost.{often}"
        ),
        subject=Subject(parameter=record.name, module=record.module or None, step=step),
        evidence=(
            *(
                phrases.series("update/ratio", frame.names[c], step, float(frame.values[row, c]), "1")
                for c in order
            ),
            *evidence,
        ),
        fix=(
            "Restart with a tenth of the learning rate, or with a warm-up; the first step of Adam moves "
            "every weight by about the rate."
        ),
        refuted_if="the weights were tiny on purpose, so that overwriting them loses little.",
    )
