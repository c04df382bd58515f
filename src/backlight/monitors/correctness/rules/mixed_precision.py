"""Rule ``mixed_precision``: the loss scale and autocast do not act where they should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from backlight.store.read.run import Event, Run
from backlight.text import count


@rule("mixed_precision", monitor="correctness")
def mixed_precision(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find scaled gradients that are clipped or used as they are, and autocast that changes no product."""
    found = contradictions(run, "mixed_precision")
    for kind in dict.fromkeys(event.payload["kind"] for event in found):
        yield _CASES[kind]([event for event in found if event.payload["kind"] == kind])


def _clipped_before_unscale(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    limit, scale = float(facts["limit"]), float(facts["scale"])
    return Finding(
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


def _scaler_bypassed(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    optimizer, scale = facts["optimizer"], float(facts["scale"])
    return Finding(
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


def _autocast_without_effect(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    inside, dtype = int(facts["inside"]), facts["dtype"]
    return Finding(
        severity=Severity.WARNING,
        title=f"Autocast to {dtype} has no effect on what is trained",
        detail=(
            f"At step {steps[0]} autocast ({facts['device']}, {dtype}) was entered, and the matrix products "
            "below the loss are in float32: "
            + (
                f"so are all {count(inside, 'product')} in it."
                if inside
                else "none of them was computed in it."
            )
            + " Training is as slow, and takes as much memory, as without autocast."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(found, inside, "products inside"),),
        fix=(
            "Compare the device type of autocast with that of the model, and look for "
            "`autocast(enabled=False)` and fp64 inputs inside."
            if inside
            else "Call the model inside of `with torch.autocast(...)`, not only the loss function."
        ),
        refuted_if="the output of the model's layers has the type of autocast.",
    )


_CASES = {
    "clipped_before_unscale": _clipped_before_unscale,
    "scaler_bypassed": _scaler_bypassed,
    "autocast_without_effect": _autocast_without_effect,
}
