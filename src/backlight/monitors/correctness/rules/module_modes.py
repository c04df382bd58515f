"""Rule ``trained_in_eval_mode``: dropout and batch norm are off while the model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import contradictions, evidence_of, steps_of
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import listed


@dataclass(frozen=True)
class TrainedInEvalModeLimits(Limits, monitor="correctness"):
    """Limits of the rule ``trained_in_eval_mode``."""

    eval_mode_steps: int = limit(2, "observed steps in evaluation mode", low=1)


@rule("trained_in_eval_mode", monitor="correctness", limits=TrainedInEvalModeLimits)
def trained_in_eval_mode(run: Run, limits: TrainedInEvalModeLimits) -> Iterator[Finding]:
    """Find models that are trained while all of their dropouts and batch norms are in evaluation mode."""
    found = contradictions(run, "trained_in_eval_mode")
    for model in dict.fromkeys(event.payload["model"] for event in found):
        of_model = [event for event in found if event.payload["model"] == model]
        steps, facts = steps_of(of_model), of_model[0].payload
        if len(steps) < limits.eval_mode_steps:
            continue
        kinds = listed([f"{amount} {kind}" for kind, amount in sorted(facts["kinds"].items())])
        yield Finding(
            severity=Severity.WARNING,
            title=f"{model} is trained in evaluation mode",
            detail=(
                f"From step {steps[0]} on, the optimizer updates {model} while the model and its {kinds} are "
                "in evaluation mode. Dropout drops nothing, and batch norm does not update its statistics."
            ),
            subject=Subject(module=facts["modules"][0] or None, step=steps[0]),
            evidence=(evidence_of(of_model, ", ".join(facts["modules"]), "modules"),),
            fix="Call `model.train()` before the training loop, and again after each evaluation.",
            refuted_if="`model.training` is True at these steps, or evaluation mode is what you want here.",
        )
