"""Rules ``weights_changed`` and ``weights_unchanged``: what writes weights, and steps that do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import (
    contradictions,
    evidence_of,
    observed,
    steps_of,
)
from backlight.monitors.correctness.model.number_spacings import SPACING
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import percent


@dataclass(frozen=True)
class WeightsChangedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``weights_changed``."""

    changed_steps: int = limit(3, "observed steps with a change", low=1)
    changed_share: float = limit(
        0.75, "share of the observed steps; Lookahead moves weights back at every fifth step or so", high=1.0
    )
    reverted_share: float = limit(0.5, "share of the optimizer's update that the change takes back")
    reverted_wholly: float = limit(0.9, "share from which on nearly nothing is learned")


@rule("weights_changed", monitor="correctness", limits=WeightsChangedLimits)
def weights_changed(run: Run, limits: WeightsChangedLimits) -> Iterator[Finding]:
    """Find weights that changed between the optimizer's step and the next forward, or before backward."""
    found = contradictions(run, "weights_changed")
    for moment in ("step", "backward"):
        of_moment = [event for event in found if event.payload["moment"] == moment]
        if len(steps_of(of_moment)) >= limits.changed_steps:
            yield _after_step(of_moment, limits) if moment == "step" else _before_backward(of_moment)


def _after_step(found: Sequence[Event], limits: WeightsChangedLimits) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    names, count = facts["parameters"], int(facts["count"])
    reverted = median(float(event.payload["reverted"]) for event in found)
    always = len(found) >= limits.changed_share * max(int(event.payload["comparisons"]) for event in found)
    is_undone = always and reverted >= limits.reverted_share
    severity = Severity.INFO
    if is_undone:
        severity = Severity.ERROR if reverted >= limits.reverted_wholly else Severity.WARNING
    return Finding(
        severity=severity,
        title=(
            "The optimizer's updates are undone before the next forward"
            if is_undone
            else f"{_changing(names, count)} outside of the optimizer"
        ),
        detail=(
            f"At {observed(steps)} {phrases.parameters(names, count)} "
            f"{'has' if count == 1 else 'have'} other values at the forward than the optimizer left"
            + (f": {percent(min(reverted, 1.0))} of its update is taken back." if is_undone else ".")
        ),
        subject=Subject(parameter=names[0], step=steps[0]),
        evidence=(evidence_of(found, round(reverted, 3), "of the update"),),
        fix=(
            "Look for code between the step and the forward that writes weights: an average that is copied "
            "into the model instead of the other way, `load_state_dict`, edits of `.data`."
        ),
        refuted_if="the weights after `optimizer.step()` and at the next forward are equal.",
    )


def _before_backward(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    names, count = facts["parameters"], int(facts["count"])
    return Finding(
        severity=Severity.WARNING,
        title=f"{_changing(names, count)} between forward and backward",
        detail=(
            f"At {observed(steps)} {phrases.parameters(names, count)} "
            f"{'has' if count == 1 else 'have'} other values when backward begins than when the forward "
            "began. The gradient belongs to weights that no longer exist."
        ),
        subject=Subject(parameter=names[0], step=steps[0]),
        evidence=(evidence_of(found, count, "parameters"),),
        fix="Write weights after `optimizer.step()`, not between the forward and `backward()`.",
        refuted_if="the weights before the forward and before `backward()` are equal.",
    )


def _changing(names: Sequence[str], count: int) -> str:
    return f"{phrases.parameters(names, count)} change{'s' if count == 1 else ''}"


@dataclass(frozen=True)
class WeightsUnchangedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``weights_unchanged``."""

    rounded_steps: int = limit(3, "observed steps that left weights as they were", low=1)
    rounded_share: float = limit(
        0.9, "share of the observed steps; some optimizers only move weights at every few steps", high=1.0
    )
    rounded_wholly: float = limit(0.99, "share of the weights from which on nothing is learned", high=1.0)
    usual_rate: float = limit(1e-5, "learning rate from which on small gradients are the cause")


@rule("weights_unchanged", monitor="correctness", limits=WeightsUnchangedLimits)
def weights_unchanged(run: Run, limits: WeightsUnchangedLimits) -> Iterator[Finding]:
    """Find steps that most weights with a gradient did not take, and steps that do nothing."""
    found = contradictions(run, "weights_unchanged")
    if ineffective := [event for event in found if event.payload["kind"] == "no_effect"]:
        yield _no_effect(ineffective)
    elif len(steps_of(found)) >= limits.rounded_steps and len(found) >= limits.rounded_share * max(
        int(event.payload["comparisons"]) for event in found
    ):
        yield _rounded(found, limits)


def _no_effect(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    rate, gradient = float(facts["rate"]), float(facts["gradient"])
    return Finding(
        severity=Severity.ERROR,
        title="The optimizer's step changes no weight",
        detail=(
            f"At {observed(steps)} every sampled weight with a gradient had the same value before "
            f"and after the step, at a learning rate of {phrases.number(rate)} and gradients of "
            f"{phrases.number(gradient)}: rounding is not the cause."
        ),
        subject=Subject(parameter=facts["parameters"][0], step=steps[0]),
        evidence=(evidence_of(found, gradient, "gradient"),),
        fix=(
            "Look at what `optimizer.step` does: a compiled step that skips its work, an update of a copy "
            "(`p = p - rate * p.grad`), or weights that a hook restores."
        ),
        refuted_if="the weights before and after `optimizer.step()` differ.",
    )


def _rounded(found: Sequence[Event], limits: WeightsUnchangedLimits) -> Finding:
    steps, facts = steps_of(found), found[-1].payload
    rate, size, dtype = float(facts["rate"]), float(facts["size"]), str(facts["dtype"])
    share, name = median(float(event.payload["share"]) for event in found), facts["parameters"][0]
    gradient = phrases.number(float(facts["gradient"]))
    spacing = size * SPACING.get(dtype, SPACING["float32"])
    fix = "Raise the learning rate, and look for a schedule or a unit that made it so small."
    if dtype in {"bfloat16", "float16"}:
        fix = "Keep the weights in fp32 and compute under `torch.autocast`."
    elif rate >= limits.usual_rate:
        fix = (
            "The learning rate is a usual one: find out why the gradients are so small, such as saturated "
            "units or a factor on the loss."
        )
    return Finding(
        severity=Severity.ERROR if share >= limits.rounded_wholly else Severity.WARNING,
        title=f"{percent(share)} of the weights do not take the optimizer's step",
        detail=(
            f"At {observed(steps)} {percent(share)} of the sampled weights with a gradient, as those of "
            f"`{name}`, had the same value before and after the step, at a learning rate of "
            f"{phrases.number(rate)} and gradients of {gradient}. "
            f"The spacing of {dtype} at their mean size of {phrases.number(size)} is "
            f"about {phrases.number(spacing)}: "
            "smaller steps are rounded away."
        ),
        subject=Subject(parameter=name, step=steps[0]),
        evidence=(evidence_of(found, round(share, 3), "of the weights"),),
        fix=fix,
        refuted_if="the optimizer rounds at random, so that small steps are taken on average.",
    )
