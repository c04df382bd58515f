"""Rule ``batch_far_from_critical``: the batch of a training is far from the noise scale of its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from backlight.monitors.spectra.model.conditions import batch_far_from_critical as holds
from backlight.monitors.spectra.model.layer_steps import CHECKPOINT, Hit, evidence, followed, worst, written
from backlight.monitors.spectra.model.thresholds import Thresholds
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("batch_far_from_critical", monitor="spectra", thresholds=("batch_factor",), restates=True)
def batch_far_from_critical(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Compare the samples of a step with the noise scale of its layers, by the median layer of the last step.

    Silent for checkpoints: the replicates there are drawn for the measurement and are no step's batch.
    """
    if run.events(CHECKPOINT):
        return
    known = followed(run)
    if not known:
        return
    step = max(layer.last.step for layer in known)
    now = [layer for layer in known if layer.last.step == step]
    scales = np.array([layer.last["noise_scale"] for layer in now])
    judged = [layer for layer, scale in zip(now, scales, strict=True) if not math.isnan(scale)]
    if not judged:
        return
    batch = judged[0].last["batch"] * judged[0].last.replicates
    # Layers share one batch: the median of them speaks for the step.
    middle = float(np.median(scales[~np.isnan(scales)]))
    found = holds(batch, middle, limits)
    if found is None:
        return
    large = found.value > 1
    hits = [Hit(layer.layer, layer.last, found) for layer in judged]
    shown = worst(hits, lambda hit: -abs(_log(hit.at["noise_scale"]) - _log(middle)))
    advice = (
        "Compare a run with a smaller batch (and more steps) at equal samples: little should be lost."
        if large
        else "Compare a run with a larger batch, or more accumulation, at an equal number of steps."
    )
    yield Finding(
        severity=Severity.INFO,
        title=(
            f"The batch of {written(batch)} samples is far {'above' if large else 'below'} the noise scale"
        ),
        detail=(
            (
                f"The batch of {written(batch)} samples at step {step} shows no signal in the median of "
                f"{len(judged)} layers: "
                if math.isinf(middle)
                else f"The batch of {written(batch)} samples at step {step} is {written(found.value)} "
                "times the "
                f"noise scale, {written(middle)} samples in the median of {len(judged)} layers: "
            )
            + (
                "most of the gain of a batch of this size is gone, and samples are spent on a gradient "
                "that is "
                "known well enough."
                if large
                else "nearly all of each step is noise."
            )
        ),
        subject=Subject(step=step),
        evidence=evidence(shown, "noise_scale", "samples"),
        fix=advice,
        refuted_if=(
            "the noise scale at neighbouring steps is within the factor, or the comparison shows otherwise: "
            "the simple noise scale ignores curvature and what the optimizer averages over steps."
        ),
    )


def _log(value: float) -> float:
    return math.log(min(max(value, 1e-30), 1e30))
