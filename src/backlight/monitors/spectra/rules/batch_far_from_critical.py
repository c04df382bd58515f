"""Rule ``batch_far_from_critical``: the batch of a run is far from the noise scale of its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings.limits import Limits, limit
from backlight.findings.phrases import number
from backlight.monitors.spectra.model.layer_history import (
    CHECKPOINT,
    Hit,
    evidence,
    layer_histories,
    worst_first,
)
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class BatchFarFromCriticalLimits(Limits, monitor="spectra"):
    """Limits of the rule ``batch_far_from_critical``."""

    batch_factor: float = limit(
        10.0,
        "a batch this many times larger or smaller than the noise scale is far from it: at ten times, nine "
        "tenths of the gain of a larger batch are gone, or most of each step is noise",
        source="McCandlish et al., arXiv:1812.06162, section 2.2: the gain of a batch is B / (B + B_simple)",
        low=1.0,
    )


@rule("batch_far_from_critical", monitor="spectra", limits=BatchFarFromCriticalLimits, restates=True)
def batch_far_from_critical(run: Run, limits: BatchFarFromCriticalLimits) -> Iterator[Finding]:
    """Compare the samples of a step with the noise scale of its layers, by the median layer of the last step.

    Silent for checkpoints: the replicates there are drawn for the measurement and are no step's batch.
    """
    histories = layer_histories(run)
    if run.events(CHECKPOINT) or not histories:
        return
    step = max(layer.last.step for layer in histories)
    known = [
        layer for layer in histories if layer.last.step == step and not math.isnan(layer.last["noise_scale"])
    ]
    if not known:
        return
    batch = known[0].last["batch"] * known[0].last.replicates
    # Layers share one batch, so their median stands for the step.
    median = float(np.median([layer.last["noise_scale"] for layer in known]))
    ratio = batch_to_noise_scale(batch, median)
    factor = limits.batch_factor
    if ratio is None or 1 / factor <= ratio <= factor:
        return
    large = ratio > 1
    hits = [Hit(layer.layer, layer.last, ratio, factor if large else 1 / factor) for layer in known]
    shown = worst_first(hits, lambda hit: -abs(_log(hit.at["noise_scale"]) - _log(median)))
    measured = f"The batch of {number(batch)} samples at step {step}"
    compared = (
        f"shows no signal in the median of {len(known)} layers"
        if math.isinf(median)
        else f"is {number(ratio)} times the noise scale ({number(median)} samples, median of {len(known)} "
        "layers)"
    )
    yield Finding(
        severity=Severity.INFO,
        title=f"The batch of {number(batch)} samples is far {'above' if large else 'below'} the noise scale",
        detail=f"{measured} {compared}: "
        + (
            "a smaller batch would give nearly the same gradient with fewer samples."
            if large
            else "nearly all of each step is noise."
        ),
        subject=Subject(step=step),
        evidence=evidence(shown, "noise_scale", "samples"),
        fix=(
            "Compare with a run of a smaller batch and more steps at equal samples: the loss should be about "
            "equal."
            if large
            else "Compare with a run of a larger batch, or more accumulation, at an equal number of steps."
        ),
        refuted_if=(
            "the noise scale at neighbouring steps is within the factor, or the comparison shows otherwise: "
            "the simple noise scale ignores curvature and what the optimizer averages over steps."
        ),
    )


def batch_to_noise_scale(batch: float, noise_scale: float) -> float | None:
    """Return the ratio of the batch of a step to the noise scale; None where either is unknown."""
    if math.isnan(noise_scale) or math.isnan(batch) or batch <= 0:
        return None
    return math.inf if noise_scale == 0 else batch / noise_scale


def _log(value: float) -> float:
    return math.log(min(max(value, 1e-30), 1e30))
