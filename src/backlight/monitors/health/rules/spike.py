"""Rule ``spike``: single steps at which the total norm or the loss leaps out of its recent past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import limit
from backlight.findings.recorded_steps import WORDS, counts_at, optimizer_sets, work_of
from backlight.monitors.health.model.history import (
    LeapLimits,
    finite_median,
    histories,
    median_and_deviation,
    more_than_before,
    stretches,
)
from backlight.monitors.health.model.score import rounding_floor, total_norms
from backlight.monitors.health.model.spike_samples import Samples, samples_at
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run, Scalar


@dataclass(frozen=True)
class _Leaps:
    """One scalar at its steps: how far each value lies above its history, and which are outliers."""

    name: str
    unit: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    medians: NDArray[np.float64]
    deviations: NDArray[np.float64]
    outliers: NDArray[np.bool_]
    by_factor: bool


@dataclass(frozen=True)
class SpikeLimits(LeapLimits):
    """Limits of the rule ``spike``."""

    spike_norm_hard: float = limit(
        10.0,
        "a leap of the norm alone is a warning from this ratio on; a lesser one that the loss does not "
        "follow is a remark, since sound runs have them now and then",
        low=1.0,
    )
    spike_loss_highest: float = limit(
        10.0,
        "out of a steep fall, a loss must leap above the highest of the last half window by this factor, and "
        "by deviations that the fall is not a part of",
        low=1.0,
    )
    spike_findings: int = limit(
        5, "largest spikes that get a finding of their own; each states how many there were", low=1
    )


@rule(
    "spike", monitor="health", limits=SpikeLimits, is_statistic=True, explained_by=("gradients_not_cleared",)
)
def spike(run: Run, limits: SpikeLimits) -> Iterator[Finding]:
    """Find leaps of total norm and loss; neighbours and both scalars together are one spike."""
    recorded = run.scalar("total_norm").steps
    norm_steps = recorded if len(recorded) else run.series_steps("gradient")
    loss = _comparable(run, run.scalar("loss"))
    norms, ratio = total_norms(run, norm_steps), limits.spike_norm_ratio
    both = (
        leaps("total_norm", "gradient", norm_steps, norms, ratio, limits, *_kinds(run, norm_steps)),
        leaps(
            "loss", loss.unit, loss.steps, loss.values, limits.spike_loss_ratio, limits,
            *_kinds(run, loss.steps),
        ),
    )  # fmt: skip
    axis = np.unique(np.concatenate([s.steps for s in both]))
    hits = np.unique(np.concatenate([s.steps[s.outliers] for s in both]))
    groups = stretches(np.searchsorted(axis, hits), limits.spike_gap)
    described = [_describe(axis[group], both) for group in groups]
    # A loss of both signs has no size to leap from: alone, it is none that the gradient confirms.
    spikes = [spike for spike in described if any(leap.by_factor for leap, _ in spike.peaks)]
    spikes.sort(key=lambda s: (-s.height, s.step))
    for spike_of in spikes[: limits.spike_findings]:
        yield _finding(run, spike_of, len(spikes), len(axis), limits)


def _comparable(run: Run, loss: Scalar) -> Scalar:
    """Return the losses of the steps whose work is known, where steps differ in their work."""
    counted = np.zeros(len(loss.steps), dtype=bool)
    varies = False
    for name in WORDS:
        counts = run.scalar(name)
        counted |= np.isin(loss.steps, counts.steps)
        varies = varies or len(np.unique(counts.values)) > 1
    return Scalar(loss.steps[counted], loss.values[counted], loss.unit) if varies else loss


def _kinds(run: Run, steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a number for the set of optimizers that stepped at each step, and its work."""
    return optimizer_sets(run, steps), work_of(run, steps)


def leaps(
    name: str,
    unit: str,
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    ratio: float,
    limits: SpikeLimits,
    sets: NDArray[np.int64] | None = None,
    work: NDArray[np.float64] | None = None,
) -> _Leaps:
    """Compare each value with the median and MAD of the finite values before it.

    Values that are all positive are compared by their logarithms, since gradient norms and losses
    scatter by factors; others as they are. A value is compared with steps of the same optimizers only, by
    ``sets``: two models that train in turn have losses and norms of their own. What a step did more than
    those before it, by ``work``, divides its value: a sum over more terms is larger.
    """
    finite = values[np.isfinite(values)]
    by_factor = len(finite) > 0 and bool((finite >= 0).all())
    work = np.ones(len(values)) if work is None else work
    if sets is not None and len(kinds := np.unique(sets)) > 1:
        medians, deviations = np.full(len(values), np.nan), np.full(len(values), np.nan)
        whole = _Leaps(name, unit, steps, values, medians, deviations, sets < 0, by_factor)
        for kind in kinds:
            rows = np.flatnonzero(sets == kind)
            part = leaps(name, unit, steps[rows], values[rows], ratio, limits, work=work[rows])
            medians[rows], deviations[rows] = part.medians, part.deviations
            whole.outliers[rows] = part.outliers
        return whole

    def scaled(raw: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            result = np.log(raw) if by_factor else raw
        return np.where(np.isfinite(result), result, np.nan)

    medians, spreads, highest, changes = (np.full(len(values), np.nan) for _ in range(4))
    recent = limits.spike_window // 2
    for stretch, before in histories(scaled(values), limits.spike_window):
        medians[stretch], spreads[stretch] = median_and_deviation(before, limits.spike_minimum)
        if name == "loss" and by_factor:
            highest[stretch] = np.where(np.isfinite(before), before, -np.inf)[:, -recent:].max(axis=1)
            # A change from one value to the next holds the noise of both, and hardly the trend.
            _, of_changes = median_and_deviation(np.diff(before, axis=1), limits.spike_minimum)
            changes[stretch] = of_changes / np.sqrt(2)
    comparable = values / more_than_before(work, limits.spike_window)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = (scaled(comparable) - medians) / spreads
        typical = np.exp(medians) if by_factor else medians
        far = comparable - typical > (ratio - 1) * np.abs(typical)
        outliers = (deviations > limits.spike_deviations) & far  # False where not finite
        over = scaled(comparable) - highest
        leaps_out = (over > np.log(limits.spike_loss_highest)) & (over > limits.spike_deviations * changes)
        outliers |= leaps_out & far
        deviations = np.where(leaps_out & far, np.fmax(deviations, over / changes), deviations)
    return _Leaps(name, unit, steps, values, typical, deviations, outliers, by_factor)


@dataclass(frozen=True)
class _Spike:
    """One spike: its first peak, its first and last step, its height as a ratio, and each scalar's peak."""

    step: int
    first: int
    last: int
    height: float
    peaks: tuple[tuple[_Leaps, int], ...]


def _describe(steps: NDArray[np.int64], both: tuple[_Leaps, ...]) -> _Spike:
    """Find the peak of each scalar among the steps of one spike; its height is in deviations."""
    peaks = []
    for leap in both:
        rows = np.flatnonzero(np.isin(leap.steps, steps) & leap.outliers)
        if len(rows):
            peaks.append((leap, int(rows[np.argmax(leap.values[rows] / np.abs(leap.medians[rows]))])))
    main, row = peaks[0]
    height = float(main.values[row] / abs(main.medians[row])) if main.medians[row] else float("inf")
    return _Spike(int(main.steps[row]), int(steps[0]), int(steps[-1]), height, tuple(peaks))


def _finding(run: Run, spike: _Spike, count: int, recorded: int, limits: SpikeLimits) -> Finding:
    parts, evidence = [], []
    for leap, row in spike.peaks:
        word = "gradient norm" if leap.name == "total_norm" else leap.name
        step, median = int(leap.steps[row]), float(leap.medians[row])
        times = f"{phrases.number(leap.values[row] / median)} times " if median > 0 else "above "
        parts.append(
            f"the {word} is {phrases.number(leap.values[row])} at step {step}, {times}its earlier median of "
            f"{phrases.number(median)} ({phrases.number(leap.deviations[row])} robust deviations)"
        )
        evidence.append(
            phrases.total_norm(run, step, leap.values[row])
            if leap.name == "total_norm"
            else phrases.scalar(leap.name, step, leap.values[row], leap.unit)
        )
    batch = run.scalar("batch")
    place = np.flatnonzero(batch.steps == spike.step)
    if len(place):
        evidence.append(phrases.scalar("batch", spike.step, batch.values[place[0]]))
    counted = counts_at(run, spike.step, limits.spike_window)
    if counted is not None:
        evidence.append(phrases.scalar(counted[0], spike.step, counted[1]))
    name, carriers = _carriers(run, spike.step, limits)
    evidence += carriers
    samples = samples_at(run, spike.first, spike.last)
    evidence += samples.evidence
    sample_text = samples.sentences(spike.step)
    lasting = f" It lasts until step {spike.last}." if spike.last != spike.step else ""
    rank = f" One of {count} spikes in {recorded} recorded steps." if count > 1 else ""
    carried = f" `{name}` grew most." if name else ""
    worked = (
        f" The step has {phrases.number(counted[1])} {WORDS[counted[0]]} (median before: "
        f"{phrases.number(counted[2])}), which do not explain it."
        if counted is not None
        else ""
    )
    claim = " and ".join(parts)
    titled = " and the ".join(
        "gradient norm" if leap.name == "total_norm" else leap.name for leap, _ in spike.peaks
    )
    clip = run.scalar("clip/limit").values
    if len(clip):
        less = f"the learning rate or the clip norm (now {phrases.number(clip[-1])})"
    elif run.events("clip_by_hand") or run.events("clip_by_value"):
        less = "the learning rate or the limit of the clipping"
    else:
        less = "the learning rate or clip the gradient norm"
    alone = [leap.name for leap, _ in spike.peaks] == ["total_norm"]
    return Finding(
        severity=Severity.INFO if alone and spike.height < limits.spike_norm_hard else Severity.WARNING,
        title=f"Spike in the {titled} at step {spike.step}",
        detail=f"{claim[0].upper()}{claim[1:]}.{lasting}{worked}{carried}{rank} {sample_text}".rstrip(),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name or ""), step=spike.step),
        evidence=tuple(evidence),
        fix=_fix(spike.step, int(batch.values[place[0]]) if len(place) else None, less, samples),
        refuted_if=(
            "the norm and the loss rise steadily before the step (the run diverges), or the same batch gives "
            "normal values with earlier weights."
        ),
    )


def _fix(step: int, batch: int | None, less: str, samples: Samples) -> str:
    if samples.stand_out:
        return f"Look at these samples; correct or remove them. If they are sound, lower {less}."
    if samples.stand_out is False:
        return f"Lower {less}: the batch is an ordinary one for these weights."
    index = "" if batch is None else f" (batch index {batch})"
    return (
        f"Inspect the batch of step {step}{index}: if other seeds spike there too, the data is the cause. "
        f"Otherwise lower {less}."
    )


def _carriers(run: Run, step: int, limits: SpikeLimits) -> tuple[str | None, list[Evidence]]:
    """Return the parameter that grew most against its own median, and evidence for the first few."""
    if not run.has("gradient"):
        return None, []
    frame = run.frame("gradient", "rms")
    place = np.flatnonzero(frame.steps == step)
    if len(place) == 0:
        return None, []
    row = int(place[0])
    before_PW = np.where(frame.measured, frame.values, np.nan)[max(0, row - limits.spike_window) : row].T
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes_2P = np.stack([frame.values[row], finite_median(before_PW, limits.spike_minimum)])
        grown_P = sizes_2P[0] / sizes_2P[1]
        is_size_P = (sizes_2P >= rounding_floor(sizes_2P)[:, None]).all(axis=0)
    columns = [int(c) for c in np.flatnonzero(np.isfinite(grown_P) & frame.measured[row] & is_size_P)]
    if not columns:
        return None, []
    order = phrases.loudest(columns, lambda c: float(grown_P[c]), 3)
    return frame.names[order[0]], [
        phrases.series("gradient/rms", frame.names[c], step, frame.values[row, c]) for c in order
    ]
