"""Rules ``unregistered_modules`` and ``optimizer_of_other_tensors``: gradients that no optimizer can use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import (
    contradictions,
    evidence_of,
    observed,
    steps_of,
)
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@rule("unregistered_modules", monitor="correctness")
def unregistered_modules(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find modules in plain lists, tuples or dicts that get gradients and that no optimizer holds."""
    found = contradictions(run, "unregistered_modules")
    for model in dict.fromkeys(event.payload["model"] for event in found):
        of_model = [event for event in found if event.payload["model"] == model]
        facts = of_model[0].payload
        names, amount = facts["modules"], int(facts["count"])
        container, attribute = phrases.parameters(names, amount), names[0].partition("[")[0]
        yield Finding(
            severity=Severity.WARNING,
            title=f"{container} {'is' if amount == 1 else 'are'} not registered with {model}",
            detail=(
                f"`{attribute}` is a plain container: `{model}.parameters()` leaves out the weights of "
                f"{count(amount, 'module')} in it. They get gradients, and no optimizer holds them: they are "
                "neither trained nor saved."
            ),
            subject=Subject(module=names[0], step=of_model[0].step),
            evidence=(evidence_of(of_model, amount, "modules"),),
            fix=f"Make `{attribute}` an `nn.ModuleList` or `nn.ModuleDict`, before the optimizer is created.",
            refuted_if="the script updates these weights without an optimizer of torch.",
        )


@dataclass(frozen=True)
class OtherTensorsLimits(Limits, monitor="correctness"):
    """Limits of the rule ``optimizer_of_other_tensors``."""

    other_tensors_steps: int = limit(2, "observed steps at which the optimizer had no gradient at all", low=1)


@rule("optimizer_of_other_tensors", monitor="correctness", limits=OtherTensorsLimits)
def optimizer_of_other_tensors(run: Run, limits: OtherTensorsLimits) -> Iterator[Finding]:
    """Find optimizers without any gradient, while a model of the same shapes has them all."""
    found = contradictions(run, "optimizer_of_other_tensors")
    steps = steps_of(found)
    if len(steps) < limits.other_tensors_steps:
        return
    facts = found[0].payload
    optimizer, model, amount = facts["optimizer"], facts["model"], int(facts["count"])
    yield Finding(
        severity=Severity.ERROR,
        title=f"{optimizer} holds other tensors than the {model} that is trained",
        detail=(
            f"At {observed(steps)} no tensor of {optimizer} had a gradient, while "
            f"{count(amount, 'parameter')} of the {model} that the loss depends on had one and "
            f"{'is' if amount == 1 else 'are'} in no optimizer. Nothing is updated."
        ),
        subject=Subject(module=model, step=steps[0]),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix="Create the optimizer from the parameters of the model that the loop calls, after any copy.",
        refuted_if="the script updates these weights without an optimizer of torch.",
    )
