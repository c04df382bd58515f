"""Rule ``module_modes``: dropout and batch norm that are off in training, or active in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import (
    Fact,
    Names,
    facts_by_kind,
    facts_of,
    finding_on,
    steps_of,
)
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import listed


@dataclass(frozen=True)
class ModuleModesLimits(Limits, monitor="correctness"):
    """Limits of the rule ``module_modes``."""

    eval_mode_steps: int = limit(2, "observed training steps in evaluation mode", low=1)


@rule("module_modes", monitor="correctness", limits=ModuleModesLimits)
def module_modes(run: Run, limits: ModuleModesLimits) -> Iterator[Finding]:
    """Find models that are trained in evaluation mode, or evaluated with what is meant for training."""
    both = {fact.model for fact in facts_of(run, StepsOnEvaluation)}  # the cause of steps in evaluation mode
    for facts in facts_by_kind(run, "module_modes"):
        if isinstance(facts[0], TrainedInEvaluation):
            facts = [fact for fact in facts if fact.model not in both]  # noqa: PLW2901
        for model in dict.fromkeys(fact.model for fact in facts):
            same = [fact for fact in facts if fact.model == model]
            if not isinstance(same[0], TrainedInEvaluation) or len(steps_of(same)) >= limits.eval_mode_steps:
                yield finding_on(same)


@dataclass(frozen=True)
class Active:
    """Modules of dropout and batch norm: the first names, how many of each class, and of dropout."""

    names: tuple[str, ...]
    kinds: dict[str, int]
    dropouts: int

    def __str__(self) -> str:
        return listed([f"{amount} {kind}" for kind, amount in sorted(self.kinds.items())])

    def effects(self, dropout: str, norm: str) -> str:
        """Return what those do that are there, as the begin of a sentence."""
        effects = [dropout] * (self.dropouts != 0) + [norm] * (self.dropouts != sum(self.kinds.values()))
        sentence = ", and ".join(effects)
        return f"{sentence[:1].upper()}{sentence[1:]}"


class TrainedInEvaluation(Fact, rule="module_modes", kind="trained_in_evaluation"):
    """Dropout and batch norm of a model, or of some ``parts`` of it, are in evaluation mode in training."""

    model: str
    active: Active
    parts: tuple[str, ...] = ()
    may_be_meant: bool = False

    def _finding(self, facts: Sequence[Self]) -> Finding:
        names = Names.of(self.parts)
        who = f"{names} of {self.model}" if self.parts else self.model
        are, module = ("are", "modules and their") if names.count > 1 else ("is", "module and its")
        effects = self.active.effects("dropout drops nothing", "batch norm does not update its statistics")
        return self.finding(
            f"{who} {are} trained in evaluation mode",
            f"From step {self.step} on, the optimizer updates {who} while the {module} {self.active} "
            f"are in evaluation mode. {effects}.",
            module=self.active.names[0],
            severity=Severity.WARNING if self.may_be_meant else Severity.ERROR,
            evidence=(", ".join(self.active.names), "modules"),
            fix=(
                f"Call {' and '.join(f'`model.{part}.train()`' for part in names.first)} before the training "
                "loop: a module keeps the mode that it was built or loaded in."
                if self.parts
                else "Call `model.train()` before the training loop, and again after each evaluation."
            ),
            refuted_if="`model.training` is True at these steps, or evaluation mode is what you want here.",
        )


class StepsOnEvaluation(Fact, rule="module_modes", kind="steps_on_evaluation"):
    """A model takes steps on one data set in training mode, and in between on another in evaluation mode."""

    model: str
    trained_on: str
    evaluated_on: str
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model} is trained on the data that it is evaluated on",
            f"By step {self.step} the optimizer had taken steps on {self.trained_on} with {self.model} in "
            f"training mode, then on {self.evaluated_on} in evaluation mode{phrases.at_line(self.line)}, and "
            "both once more: the loop of the evaluation takes steps as well.",
            module=self.model,
            line=self.line,
            evidence=(self.evaluated_on,),
            fix="Run `backward()` and `optimizer.step()` in the training phase only, and evaluate under "
            "`torch.no_grad()`.",
            refuted_if="both are to be trained on, one of them without dropout and batch statistics.",
        )


class EvaluatedInTraining(Fact, rule="module_modes", kind="evaluated_in_training"):
    """Dropout and batch norm of a model are in training mode while it is evaluated."""

    model: str
    active: Active

    def _finding(self, facts: Sequence[Self]) -> Finding:
        effects = self.active.effects(
            "dropout drops values", "batch norm mixes each batch into its statistics"
        )
        return self.finding(
            f"{self.model} is evaluated in training mode",
            f"At step {self.step} batches of a data set that nothing is learned from went through "
            f"{self.model} without gradients, while its {self.active} were in training mode. {effects}: the "
            "figures are not those of the model.",
            module=self.active.names[0],
            evidence=(", ".join(self.active.names), "modules"),
            fix="Call `model.eval()` before the evaluation and `model.train()` after it.",
            refuted_if="these forwards are no evaluation, for instance samples from dropout.",
        )


class DropoutInEvaluation(Fact, rule="module_modes", kind="dropout_in_evaluation"):
    """Functional dropout was active although every module was in evaluation mode."""

    model: str
    function: str
    p: float
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        p, where = phrases.number(self.p), phrases.at_line(self.line)
        return self.finding(
            f"Dropout is active while {self.model} is evaluated",
            f"At step {self.step} every module of {self.model} was in evaluation mode, and "
            f"`F.{self.function}`{where} dropped values with probability {p}: a function does not know of "
            "the mode.",
            line=self.line,
            evidence=(self.p, "probability"),
            fix=(
                f"Write `dropout_p={p} if self.training else 0.0`."
                if self.function == "scaled_dot_product_attention"
                else f"Write `F.dropout(x, {p}, self.training)`, or use `nn.Dropout`."
            ),
            refuted_if="the evaluation samples from dropout on purpose.",
        )


class FrozenStatistics(Fact, rule="module_modes", kind="frozen_statistics"):
    """Batch norms whose weights are frozen, in a model that is trained, update their running statistics."""

    model: str
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"Frozen batch norms of {self.model} still change their statistics",
            f"By step {self.step} the running means of {self.names} had changed between observed steps, and "
            "their weights, which require no gradient, had not. What is frozen computes something else with "
            "every step: `requires_grad` does not set the mode.",
            severity=Severity.INFO,
            module=self.names.first[0],
            evidence=(self.names.count, "modules"),
            fix="Call `model.backbone.eval()` after each `model.train()`.",
            refuted_if="the statistics are to adapt to other data.",
        )


class InitialStatistics(Fact, rule="module_modes", kind="initial_statistics"):
    """Batch norms of a trained model use the statistics that they were built with."""

    model: str
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model} is evaluated with the initial statistics of batch norm",
            f"At step {self.step} the running mean of {self.names} is 0 "
            "and the running variance 1, as they were built, although the model is being trained. The "
            "evaluation normalises with other statistics than training.",
            module=self.names.first[0],
            evidence=(self.names.count, "modules"),
            fix="Train with batch norm in training mode and a momentum above 0, or load its statistics.",
            refuted_if="`running_mean` and `running_var` of these modules differ from 0 and 1.",
        )


class AverageStatistics(Fact, rule="module_modes", kind="average_statistics"):
    """Batch norms of an average of weights use the statistics that they were built with."""

    model: str
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model}, an average of weights, has the initial statistics of batch norm",
            f"At step {self.step} {self.model} was evaluated with weights that follow those of the trained "
            f"model. The running mean of {self.names} is 0 and the running variance 1, as they were built: "
            "statistics are buffers, and only the parameters were averaged.",
            module=self.names.first[0],
            evidence=(self.names.count, "modules"),
            fix=(
                "Copy the buffers of the model at each update, as `torch.optim.swa_utils.AveragedModel` "
                "does, or call `update_bn(loader, average)` before the evaluation."
            ),
            refuted_if="`running_mean` and `running_var` of these modules differ from 0 and 1.",
        )


class SpectralVector(Fact, rule="module_modes", kind="spectral_vector"):
    """Vectors of spectral norm, whose length is 1 by definition, have another one in an evaluation."""

    model: str
    names: Names
    length: float

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"The vectors of spectral norm in {self.model} are not of length 1",
            f"At step {self.step} {self.model}, an average of weights, was evaluated, and the left vector of "
            f"{self.names} had the length {phrases.number(self.length)}: the estimate that the weights are "
            "divided by is wrong by that factor. The mean of unit vectors is none.",
            module=self.names.first[0],
            evidence=(self.length, "length"),
            fix=(
                "Copy these buffers from the model instead of averaging them, or run one batch of the "
                "average in training mode before the evaluation."
            ),
            refuted_if="`_u.norm()` of these modules is 1.",
        )


class TrainNotCalled(Fact, rule="module_modes", kind="train_not_called"):
    """A class ``does`` something in a ``train`` of its own, which was never called."""

    model: str
    module: str
    does: str
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        where = phrases.at_line(self.line)
        return self.finding(
            f"`{self.model}.train()` was not called before training",
            f"{self.model} defines a `train()` of its own{where}, which {self.does}. At step {self.step} "
            "neither it nor `eval()` had been called since the module was built, and nothing in it was in "
            "that state.",
            module=self.module or self.model,
            line=self.line,
            severity=Severity.INFO,
            evidence=(self.does,),
            fix="Call `model.train()` once before the optimizer is created.",
            refuted_if=f"`train()` changes nothing with the options of this {self.model}.",
        )


class RandomSpectralNorm(Fact, rule="module_modes", kind="random_spectral_norm"):
    """A model is evaluated before a power iteration of these spectral norms has run."""

    model: str
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model} is evaluated before its spectral norm is estimated",
            f"At step {self.step} {self.model} ran in evaluation mode, and the power iteration of "
            f"{self.names} had never run: the weights were divided by an "
            "estimate from two random vectors, which makes them too large.",
            module=self.names.first[0],
            severity=Severity.INFO,
            evidence=(self.names.count, "modules"),
            fix=(
                "Use `torch.nn.utils.parametrizations.spectral_norm`, or run one batch in training mode "
                "first."
            ),
            refuted_if="the results of this evaluation are not used.",
        )
