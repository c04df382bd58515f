"""Rule ``module_modes``: dropout and batch norm that are off in training, or active in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import contradictions, evidence_of, steps_of
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import listed


@dataclass(frozen=True)
class ModuleModesLimits(Limits, monitor="correctness"):
    """Limits of the rule ``module_modes``."""

    eval_mode_steps: int = limit(2, "observed training steps in evaluation mode", low=1)


@rule("module_modes", monitor="correctness", limits=ModuleModesLimits)
def module_modes(run: Run, limits: ModuleModesLimits) -> Iterator[Finding]:
    """Find models that are trained in evaluation mode, or evaluated with what is meant for training."""
    found = contradictions(run, "module_modes")
    for model, kind in dict.fromkeys((event.payload["model"], event.payload["kind"]) for event in found):
        same = [e for e in found if (e.payload["model"], e.payload["kind"]) == (model, kind)]
        if kind != "trained_in_evaluation" or len(steps_of(same)) >= limits.eval_mode_steps:
            yield _CASES[kind](model, same)


def _trained_in_evaluation(model: str, found: Sequence[Event]) -> Finding:
    step, facts = steps_of(found)[0], found[0].payload
    part = facts.get("part", "")
    who = f"`{part}` of {model}" if part else model
    return Finding(
        severity=Severity.WARNING if facts.get("may_be_meant") else Severity.ERROR,
        title=f"{who} is trained in evaluation mode",
        detail=(
            f"From step {step} on, the optimizer updates {who} while the module and its "
            f"{_kinds(found[0])} are in evaluation mode. "
            f"{_effects(found[0], 'dropout drops nothing', 'batch norm does not update its statistics')}."
        ),
        subject=Subject(module=facts["modules"][0] or None, step=step),
        evidence=(evidence_of(found, ", ".join(facts["modules"]), "modules"),),
        fix=(
            f"Call `model.{part}.train()` before the training loop: it keeps the mode that it was "
            "built or loaded in."
            if part
            else "Call `model.train()` before the training loop, and again after each evaluation."
        ),
        refuted_if="`model.training` is True at these steps, or evaluation mode is what you want here.",
    )


def _evaluated_in_training(model: str, found: Sequence[Event]) -> Finding:
    step, facts = steps_of(found)[0], found[0].payload
    return Finding(
        severity=Severity.WARNING,
        title=f"{model} is evaluated in training mode",
        detail=(
            f"At step {step} batches of a data set that nothing is learned from went through {model} "
            f"without gradients, while its {_kinds(found[0])} were in training mode. "
            f"{_effects(found[0], 'dropout drops values', 'batch norm mixes each batch into its statistics')}"
            ": the figures are not those of the model."
        ),
        subject=Subject(module=facts["modules"][0] or None, step=step),
        evidence=(evidence_of(found, ", ".join(facts["modules"]), "modules"),),
        fix="Call `model.eval()` before the evaluation and `model.train()` after it.",
        refuted_if="these forwards are no evaluation, for instance samples from dropout.",
    )


def _dropout_in_evaluation(model: str, found: Sequence[Event]) -> Finding:
    step, facts = steps_of(found)[0], found[0].payload
    function, p = facts["function"], float(facts["p"])
    where = f" at `{facts['line']}`" if facts["line"] else ""
    is_attention = function == "scaled_dot_product_attention"
    return Finding(
        severity=Severity.WARNING,
        title=f"Dropout is active while {model} is evaluated",
        detail=(
            f"At step {step} every module of {model} was in evaluation mode, and `F.{function}`{where} "
            f"dropped values with probability {phrases.number(p)}: a function does not know of the mode."
        ),
        subject=Subject(step=step, line=facts["line"] or None),
        evidence=(evidence_of(found, p, "probability"),),
        fix=(
            f"Write `dropout_p={phrases.number(p)} if self.training else 0.0`."
            if is_attention
            else f"Write `F.dropout(x, {phrases.number(p)}, self.training)`, or use `nn.Dropout`."
        ),
        refuted_if="the evaluation samples from dropout on purpose.",
    )


def _initial_statistics(model: str, found: Sequence[Event]) -> Finding:
    step, facts = steps_of(found)[0], found[0].payload
    names, count = facts["modules"], int(facts["count"])
    return Finding(
        severity=Severity.WARNING,
        title=f"{model} is evaluated with the initial statistics of batch norm",
        detail=(
            f"At step {step} the running mean of {phrases.parameters(names, count)} is 0 and the running "
            "variance 1, as they were built, although the model is being trained. The evaluation normalises "
            "with other statistics than training."
        ),
        subject=Subject(module=names[0] or None, step=step),
        evidence=(evidence_of(found, count, "modules"),),
        fix="Train with batch norm in training mode and a momentum above 0, or load its statistics.",
        refuted_if="`running_mean` and `running_var` of these modules differ from 0 and 1.",
    )


def _train_not_called(model: str, found: Sequence[Event]) -> Finding:
    step, facts = steps_of(found)[0], found[0].payload
    where = f" at `{facts['line']}`" if facts["line"] else ""
    does = " and ".join(facts["does"])
    return Finding(
        severity=Severity.INFO,
        title=f"`{model}.train()` was not called before training",
        detail=(
            f"{model} defines a `train()` of its own{where}, which {does}. At step {step} neither it nor "
            "`eval()` had been called since the module was built, and nothing in it was in that state."
        ),
        subject=Subject(module=facts["modules"][0] or model, step=step, line=facts["line"] or None),
        evidence=(evidence_of(found, does),),
        fix="Call `model.train()` once before the optimizer is created.",
        refuted_if=f"`train()` changes nothing with the options of this {model}.",
    )


def _random_spectral_norm(model: str, found: Sequence[Event]) -> Finding:
    step, facts = steps_of(found)[0], found[0].payload
    names, count = facts["modules"], int(facts["count"])
    return Finding(
        severity=Severity.INFO,
        title=f"{model} is evaluated before its spectral norm is estimated",
        detail=(
            f"At step {step} {model} ran in evaluation mode, and the power iteration of "
            f"{phrases.parameters(names, count)} had never run: the weights were divided by an estimate from "
            "two random vectors, which makes them too large."
        ),
        subject=Subject(module=names[0] or None, step=step),
        evidence=(evidence_of(found, count, "modules"),),
        fix="Use `torch.nn.utils.parametrizations.spectral_norm`, or run one batch in training mode first.",
        refuted_if="the results of this evaluation are not used.",
    )


_CASES = {
    "trained_in_evaluation": _trained_in_evaluation,
    "evaluated_in_training": _evaluated_in_training,
    "dropout_in_evaluation": _dropout_in_evaluation,
    "initial_statistics": _initial_statistics,
    "train_not_called": _train_not_called,
    "random_spectral_norm": _random_spectral_norm,
}


def _effects(event: Event, dropout: str, norm: str) -> str:
    """Return what those modules do in their mode that are there."""
    total = sum(event.payload["kinds"].values())
    dropouts = event.payload.get("dropouts")
    said = [dropout] * (dropouts != 0) + [norm] * (dropouts != total)
    sentence = ", and ".join(said)
    return f"{sentence[:1].upper()}{sentence[1:]}"


def _kinds(event: Event) -> str:
    return listed([f"{amount} {kind}" for kind, amount in sorted(event.payload["kinds"].items())])
