"""Rules ``clipped_before_unscale`` and ``scaler_bypassed``: gradients that contain the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.findings import phrases
from backlight.findings.limits import Limits
from backlight.monitors.correctness.model.contradictions import (
    contradictions,
    evidence_of,
    observed,
    steps_of,
)
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("clipped_before_unscale", monitor="correctness")
def clipped_before_unscale(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find steps whose gradients were clipped while they still contained the loss scale."""
    found = contradictions(run, "clipped_before_unscale")
    if not found:
        return
    steps, facts = steps_of(found), found[0].payload
    limit, scale = float(facts["limit"]), float(facts["scale"])
    yield Finding(
        severity=Severity.WARNING,
        title="Gradients are clipped before they are unscaled",
        detail=(
            f"At step {steps[0]} gradients were clipped to {phrases.number(limit)} while they contained the "
            f"loss scale {phrases.number(scale)}. The limit on the true gradients was "
            f"{phrases.number(limit / scale)}."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(found, scale, "loss scale"),),
        fix="Call `scaler.unscale_(optimizer)` before clipping.",
        refuted_if="the script divides the gradients by the scale itself before it clips them.",
    )


@rule("scaler_bypassed", monitor="correctness")
def scaler_bypassed(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find optimizer steps that took scaled gradients as they were."""
    found = contradictions(run, "scaler_bypassed")
    if not found:
        return
    steps, facts = steps_of(found), found[0].payload
    optimizer, scale = facts["optimizer"], float(facts["scale"])
    yield Finding(
        severity=Severity.WARNING,
        title=f"{optimizer} takes steps with scaled gradients",
        detail=(
            f"At {observed(steps)} the loss was multiplied by the scale {phrases.number(scale)}, and "
            f"{optimizer} took the gradients as they were, without the scaler. They are too large by that "
            "factor, and a step with infinite values is not skipped."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(found, scale, "loss scale"),),
        fix="Call `scaler.step(optimizer)` and `scaler.update()` in place of `optimizer.step()`.",
        refuted_if="the script divides the gradients by the scale itself.",
    )
