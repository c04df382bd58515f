"""Rules ``weights_changed`` and ``weights_unchanged``: what writes weights, and steps that do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import (
    Fact,
    Names,
    facts_of,
    finding_on,
    observed,
    steps_of,
)
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, percent

SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
"""Mean distance of neighbouring numbers as a share of their size, about, by type."""


@dataclass(frozen=True)
class WeightsChangedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``weights_changed``."""

    changed_steps: int = limit(3, "observed steps with a change", low=1)
    changed_share: float = limit(
        0.75, "share of the observed steps; Lookahead moves weights back at every fifth step or so", high=1.0
    )
    reverted_share: float = limit(0.5, "share of the optimizer's update that the change takes back")
    reverted_wholly: float = limit(0.9, "share from which on nearly nothing is learned")


class ChangedAfterStep(Fact, rule="weights_changed", kind="step"):
    """Weights have other values than the optimizer left: ``reverted`` is the share of its update taken back.

    It is one of ``comparisons`` so far.
    """

    names: Names
    reverted: float
    comparisons: int


class ChangedBeforeBackward(Fact, rule="weights_changed", kind="backward"):
    """Weights have other values as backward begins than as the forward began."""

    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.names} {self.names.verb('changes', 'change')} between forward and backward",
            f"At {observed(facts)} {self.names} {self.names.verb('has', 'have')} other values when backward "
            "begins than when the forward began. The gradient belongs to weights that no longer exist.",
            parameter=self.names.first[0],
            evidence=(self.names.count, "parameters"),
            fix="Write weights after `optimizer.step()`, not between the forward and `backward()`.",
            refuted_if="the weights before the forward and before `backward()` are equal.",
        )


@rule("weights_changed", monitor="correctness", limits=WeightsChangedLimits)
def weights_changed(run: Run, limits: WeightsChangedLimits) -> Iterator[Finding]:
    """Find weights that changed between the optimizer's step and the next forward, or before backward."""
    after_step, before_backward = facts_of(run, ChangedAfterStep), facts_of(run, ChangedBeforeBackward)
    if len(steps_of(after_step)) >= limits.changed_steps:
        yield _after_step(after_step, limits)
    if len(steps_of(before_backward)) >= limits.changed_steps:
        yield finding_on(before_backward)


def _after_step(facts: Sequence[ChangedAfterStep], limits: WeightsChangedLimits) -> Finding:
    names, reverted = facts[0].names, median(fact.reverted for fact in facts)
    always = len(facts) >= limits.changed_share * max(fact.comparisons for fact in facts)
    is_undone = always and reverted >= limits.reverted_share
    severity = Severity.INFO
    if is_undone:
        severity = Severity.ERROR if reverted >= limits.reverted_wholly else Severity.WARNING
    return facts[0].finding(
        (
            "The optimizer's updates are undone before the next forward"
            if is_undone
            else f"{names} {names.verb('changes', 'change')} outside of the optimizer"
        ),
        f"At {observed(facts)} {names} {names.verb('has', 'have')} other values at the forward than the "
        "optimizer left"
        + (f": {percent(min(reverted, 1.0))} of its update is taken back." if is_undone else "."),
        parameter=names.first[0],
        severity=severity,
        evidence=(round(reverted, 3), "of the update"),
        fix=(
            "Look for code between the step and the forward that writes weights: an average that is copied "
            "into the model instead of the other way, `load_state_dict`, edits of `.data`."
        ),
        refuted_if="the weights after `optimizer.step()` and at the next forward are equal.",
    )


@dataclass(frozen=True)
class WeightsUnchangedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``weights_unchanged``."""

    rounded_steps: int = limit(3, "observed steps that left weights as they were", low=1)
    rounded_share: float = limit(
        0.9, "share of the observed steps; some optimizers only move weights at every few steps", high=1.0
    )
    rounded_wholly: float = limit(0.99, "share of the weights from which on nothing is learned", high=1.0)
    usual_rate: float = limit(1e-5, "learning rate from which on small gradients are the cause")


class _Unchanged(Fact):
    """A step that left a ``share`` of the weights with a gradient as they were, one of ``comparisons``.

    The others are of the parameter with the most: rate, type, mean size of weights and of gradients.
    """

    parameter: str
    share: float
    rate: float
    dtype: str
    size: float
    gradient: float
    comparisons: int


class RoundedStep(_Unchanged, rule="weights_unchanged", kind="rounded"):
    """The step is smaller than the spacing of the type."""


class StepWithoutEffect(_Unchanged, rule="weights_unchanged", kind="no_effect"):
    """The step is larger than that, and did nothing."""

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            "The optimizer's step changes no weight",
            f"At {observed(facts)} every sampled weight with a gradient had the same value before and after "
            f"the step, at a learning rate of {phrases.number(self.rate)} and gradients of "
            f"{phrases.number(self.gradient)}: rounding is not the cause.",
            parameter=self.parameter,
            severity=Severity.ERROR,
            evidence=(self.gradient, "gradient"),
            fix=(
                "Look at what `optimizer.step` does: a compiled step that skips its work, an update of a "
                "copy (`p = p - rate * p.grad`), or weights that a hook restores."
            ),
            refuted_if="the weights before and after `optimizer.step()` differ.",
        )


class StepsUndone(Fact, rule="weights_unchanged", kind="undone"):
    """A line loaded the same weights again, after ``steps`` steps of an optimizer that goes on.

    ``has_state`` is whether it has moments; ``times`` how often in a row they came back.
    """

    model: str
    steps: int
    times: int
    has_state: bool
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model}.load_state_dict undoes the steps since it was last called",
            f"By step {self.step} the state{phrases.at_line(self.line)} had brought back the same weights "
            f"{self.times} times, the last time after {count(self.steps, 'step')}. The optimizer goes on "
            + (
                "with the moments of the steps that are lost."
                if self.has_state
                else "as it was: all that is kept of these steps is what was computed on the way."
            ),
            module=self.model,
            line=self.line,
            severity=Severity.WARNING if self.has_state else Severity.INFO,
            evidence=(self.times, "times"),
            fix=(
                "Load the state once, before the loop; keep the best weights for the end. Where each round "
                "is to begin anew, build a new optimizer as well."
            ),
            refuted_if="each round is a run of its own, and its result is kept elsewhere.",
        )


class AverageNeverUpdated(Fact, rule="weights_unchanged", kind="average"):
    """An average of weights was evaluated at several steps up to ``last``, and never updated in the run."""

    model: str
    last: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model} is evaluated, and never updated",
            f"From step {self.step} to step {self.last} {self.model} was evaluated with the weights that it "
            "was created with: `update_parameters` was not called, and `n_averaged` is 0.",
            module=self.model,
            evidence=(self.last, "step"),
            fix="Call `average.update_parameters(model)` after `optimizer.step()`.",
            refuted_if="the run ended before the step at which the average is to begin.",
        )


@rule("weights_unchanged", monitor="correctness", limits=WeightsUnchangedLimits)
def weights_unchanged(run: Run, limits: WeightsUnchangedLimits) -> Iterator[Finding]:
    """Find steps that most weights with a gradient did not take, steps that do nothing, and dead averages."""
    if averages := facts_of(run, AverageNeverUpdated):
        yield finding_on(averages)
    # What undoes each single step is reported by the rule `weights_changed`.
    if undone := [fact for fact in facts_of(run, StepsUndone) if fact.steps > 1]:
        yield finding_on(undone)
    facts = facts_of(run, RoundedStep)
    if ineffective := facts_of(run, StepWithoutEffect):
        yield finding_on(ineffective)
    elif len(steps_of(facts)) >= limits.rounded_steps and len(facts) >= limits.rounded_share * max(
        fact.comparisons for fact in facts
    ):
        yield _rounded(facts, limits)


def _rounded(facts: Sequence[RoundedStep], limits: WeightsUnchangedLimits) -> Finding:
    last, share = facts[-1], median(fact.share for fact in facts)
    spacing = last.size * SPACING.get(last.dtype, SPACING["float32"])
    fix = "Raise the learning rate, and look for a schedule or a unit that made it so small."
    if last.dtype in {"bfloat16", "float16"}:
        fix = "Keep the weights in fp32 and compute under `torch.autocast`."
    elif last.rate >= limits.usual_rate:
        fix = (
            "The learning rate is a usual one: find out why the gradients are so small, such as saturated "
            "units or a factor on the loss."
        )
    return facts[0].finding(
        f"{percent(share)} of the weights do not take the optimizer's step",
        f"At {observed(facts)} {percent(share)} of the sampled weights with a gradient, as those of "
        f"`{last.parameter}`, had the same value before and after the step, at a learning rate of "
        f"{phrases.number(last.rate)} and gradients of {phrases.number(last.gradient)}. The spacing of "
        f"{last.dtype} at their mean size of {phrases.number(last.size)} is about {phrases.number(spacing)}: "
        "smaller steps are rounded away.",
        parameter=last.parameter,
        severity=Severity.ERROR if share >= limits.rounded_wholly else Severity.WARNING,
        evidence=(round(share, 3), "of the weights"),
        fix=fix,
        refuted_if="the optimizer rounds at random, so that small steps are taken on average.",
    )
