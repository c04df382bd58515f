"""Rule ``underflow``: half-precision gradients that are zero because fp16 cannot hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.health.model.history import at_steps, finite_median
from backlight.monitors.health.model.score import skipped_steps
from backlight.records import Finding, ParameterRecord, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class UnderflowLimits(Limits, monitor="health"):
    """Limits of the rule ``underflow``."""

    underflow_zero_share: float = limit(0.1, "share of values of a gradient that are exactly zero", high=1.0)
    underflow_magnitude: float = limit(
        2.0**-20,
        "rms of the other values, times the loss scale: normally distributed values of which a tenth rounds "
        "to zero have four times the smallest subnormal, heavy tails four times more",
        source="IEEE 754 binary16: smallest normal number 2^-14, smallest subnormal 2^-24",
    )
    underflow_window: int = limit(20, "last recorded steps that the medians are taken over", low=1)


@rule("underflow", monitor="health", limits=UnderflowLimits, needs=("gradient",))
def underflow(run: Run, limits: UnderflowLimits) -> Iterator[Finding]:
    """Find matrices with many zeros whose other values, under the scale, are the smallest that fp16 has.

    Zeros of other origin (a dead ReLU, tokens that did not occur) leave values of ordinary size next to
    them. fp32 parameters are evaluated only under a gradient scaler: autocast computes their gradient in
    fp16 and casts it afterwards.
    """
    scale = run.scalar("scaler/scale")
    scaled = len(scale.steps) > 0
    suspects = [record for record in run.parameters() if _suspect(record, scaled)]
    if not suspects:
        return
    norm = run.frame("gradient", "norm")
    zeros, sizes = run.frame("gradient", "zeros"), run.frame("gradient", "numel")
    scale_S = at_steps(norm.steps, scale.steps, scale.values)
    scale_S = np.where(np.isfinite(scale_S), scale_S, 1.0)
    taken_S = ~np.isin(norm.steps, list(skipped_steps(run)))
    found: dict[int, tuple[float, float, int]] = {}
    evaluated = 0
    for record in suspects:
        column = norm.names.index(record.name)
        rows = np.flatnonzero(norm.measured[:, column] & np.isfinite(norm.values[:, column]) & taken_S)
        rows = rows[-limits.underflow_window :]
        if len(rows) < limits.underflow_window:
            continue
        evaluated += 1
        others = (sizes.values[rows, column] - zeros.values[rows, column]).astype(float)
        share = float(np.median(1.0 - others / np.maximum(sizes.values[rows, column], 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            magnitude = float(finite_median(norm.values[rows, column] / np.sqrt(others) * scale_S[rows]))
        if limits.underflow_zero_share <= share < 1.0 and magnitude < limits.underflow_magnitude:
            found[column] = (share, magnitude, int(rows[-1]))
    if not found:
        return
    order = phrases.loudest(found, lambda c: found[c][0])
    worst = order[0]
    name, (share, magnitude, last) = norm.names[worst], found[worst]
    step = int(norm.steps[last])
    under = (
        f" under a loss scale of {phrases.number(float(scale_S[last]))}"
        if scaled
        else " without a loss scale"
    )
    evidence = [
        phrases.series(
            "gradient/zero_share",
            norm.names[c],
            int(norm.steps[found[c][2]]),
            float(zeros.values[found[c][2], c] / sizes.values[found[c][2], c]),
            "1",
        )
        for c in order
    ]
    evidence.append(phrases.series("gradient/norm", name, step, norm.values[last, worst]))
    if scaled:
        evidence.append(phrases.scalar("scaler/scale", step, float(scale_S[last])))
    yield Finding(
        severity=Severity.WARNING,
        title=(
            f"{phrases.gradient_of([norm.names[c] for c in order], len(found))} "
            f"underflow{'s' if len(found) == 1 else ''} in fp16"
        ),
        detail=(
            f"{100 * share:.0f} % of the values of `{name}` are exactly zero, and the rms of the "
            f"others{under} is {phrases.number(magnitude)}: fp16 rounds values below 3e-8 to zero. "
            f"Affected: {phrases.share(len(found), evaluated, 'half-precision matrices')}."
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=step),
        evidence=tuple(evidence),
        fix=(
            "Scale the loss (`torch.amp.GradScaler`; raise `init_scale` or lower `growth_interval` if there "
            "is one), or use bfloat16."
        ),
        refuted_if="the share of zeros is the same in fp32 or at a larger scale.",
    )


def _suspect(record: ParameterRecord, scaled: bool) -> bool:
    """Return whether the gradient of a parameter was computed in fp16, and is expected to have no zeros."""
    half = record.dtype == "float16" or (scaled and record.dtype == "float32")
    return half and len(record.shape) >= 2 and "Embedding" not in record.module_type
