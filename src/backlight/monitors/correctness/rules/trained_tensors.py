"""Rule ``trained_tensors``: the tensors that optimizers hold are not those that the loss trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import (
    Fact,
    Names,
    facts_by_kind,
    facts_of,
    finding_on,
    observed,
    steps_of,
)
from backlight.monitors.correctness.rules.restored_state import UntiedWhenLoaded
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, listed


@dataclass(frozen=True)
class TrainedTensorsLimits(Limits, monitor="correctness"):
    """Limits of the rule ``trained_tensors``."""

    other_tensors_steps: int = limit(2, "observed steps at which the optimizer had no gradient at all", low=1)
    frozen_tensors_steps: int = limit(2, "observed steps with the same gradients of frozen tensors", low=1)
    left_out_steps: int = limit(2, "observed steps at which trained parameters were in no optimizer", low=1)


@rule("trained_tensors", monitor="correctness", limits=TrainedTensorsLimits)
def trained_tensors(run: Run, limits: TrainedTensorsLimits) -> Iterator[Finding]:
    """Find gradients that no optimizer uses, tensors that no loss depends on, and states that are lost."""
    needed = {
        TrainedCopy: limits.other_tensors_steps,
        FrozenParameters: limits.frozen_tensors_steps,
        LeftOut: limits.left_out_steps,
    }
    joined = facts_of(run, Joined)
    groups: dict[tuple[type[Fact], Any], list[Any]] = {}
    for facts in facts_by_kind(run, "trained_tensors"):
        for fact in facts:
            if not isinstance(fact, Joined) and not _has_joined(fact, joined):
                groups.setdefault((type(fact), getattr(fact, fact.about)), []).append(fact)
    for (kind, _), facts in groups.items():
        if kind is Untied and facts_of(run, UntiedWhenLoaded):  # that rule knows the checkpoint
            continue
        is_unfrozen = kind is LeftOut and facts[0].is_unfrozen
        if len(steps_of(facts)) >= (1 if is_unfrozen else needed.get(kind, 1)):
            yield finding_on(facts)


class _Trained(Fact):
    """A fact of one finding with others of its class that have the same value in the field ``about``."""

    about: ClassVar[str] = "model"


class FrozenRowsMove(_Trained, rule="trained_tensors", kind="frozen_rows"):
    """A script makes the gradients of ``frozen`` of the ``rows`` of a parameter zero, and these rows move."""

    about = "parameter"
    parameter: str
    rows: int
    frozen: int
    decay: float
    optimizer: str
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        by_decay = f"a weight decay of {phrases.number(self.decay)}"
        cause = by_decay if self.decay else "moments of earlier gradients"
        hook = f" (a hook{phrases.at_line(self.line)} changes them)" if self.line else ""
        return self.finding(
            f"Rows of `{self.parameter}` whose gradients are set to zero still move",
            f"Up to step {self.step} the gradients of {self.frozen:,} of the {self.rows:,} rows of "
            f"`{self.parameter}` were zero whenever {self.optimizer} stepped, although backward gave them "
            f"values{hook}. Their weights changed all the same: {self.optimizer} has {cause}.",
            parameter=self.parameter,
            line=self.line,
            evidence=(self.frozen, "rows"),
            fix=(
                "Put the frozen rows into a tensor of their own with `requires_grad=False`, or give "
                "the parameter a group with `weight_decay=0.0`."
                if self.decay
                else "Put the frozen rows into a tensor of their own with `requires_grad=False`."
            ),
            refuted_if="these rows are meant to decay, or are written by something else.",
        )


class Joined(_Trained, rule="trained_tensors", kind="joined"):
    """An optimizer now holds so many parameters of a model that were reported as being in none."""

    model: str
    count: int


def _has_joined(fact: Fact, joined: Sequence[Joined]) -> bool:
    """Return whether an optimizer holds later what a fact reports as being in none."""
    return isinstance(fact, _Outside) and any(
        (later.rank, later.model) == (fact.rank, fact.model)
        and later.step > fact.step
        and later.count >= fact.names.count
        for later in joined
    )


class PaddingRow(_Trained, rule="trained_tensors", kind="padding_row"):
    """The row ``index`` of an embedding is not zero and has no gradient; ``count`` inputs depend on it."""

    about = "name"

    name: str
    index: int
    count: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"Row {self.index} of `{self.name}`, its padding, is used and never trained",
            f"`padding_idx={self.index}` leaves the row out of the gradient, and its values are not zero: "
            f"the initialisation was overwritten, or a checkpoint brought them. The loss depends on it at "
            f"{count(self.count, 'position')} of a batch, as where padding is not masked.",
            parameter=self.name,
            evidence=(self.count, "positions"),
            fix=(
                "Set the row to zero after the initialisation, with `torch.no_grad()`, and mask the padding "
                "in attention and pooling; or leave out `padding_idx` if the token is an ordinary one."
            ),
            refuted_if="a fixed vector for padding is meant.",
        )


class Unregistered(_Trained, rule="trained_tensors", kind="unregistered"):
    """Modules with gradients are in plain containers of a model."""

    model: str
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        attribute = self.names.first[0].partition("[")[0]
        return self.finding(
            f"{self.names} {self.names.verb('is', 'are')} not registered with {self.model}",
            f"`{attribute}` is a plain container: `{self.model}.parameters()` leaves out the weights of "
            f"{count(self.names.count, 'module')} in it. They get gradients, and no optimizer holds them: "
            "they are neither trained nor saved.",
            module=self.names.first[0],
            severity=Severity.ERROR,
            evidence=(self.names.count, "modules"),
            fix=f"Make `{attribute}` an `nn.ModuleList` or `nn.ModuleDict`, before the optimizer is created.",
            refuted_if="the script updates these weights without an optimizer of torch.",
        )


class TrainedCopy(_Trained, rule="trained_tensors", kind="copy"):
    """The optimizer has no gradient at all, and ``count`` parameters of a model of the same shapes have."""

    model: str
    count: int
    optimizer: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.optimizer} holds other tensors than the {self.model} that is trained",
            f"At {observed(facts)} no tensor of {self.optimizer} had a gradient, while "
            f"{count(self.count, 'parameter')} of the {self.model} that the loss depends on had one and "
            f"{'is' if self.count == 1 else 'are'} in no optimizer. Nothing is updated.",
            module=self.model,
            severity=Severity.ERROR,
            evidence=(self.count, "parameters"),
            fix="Create the optimizer from the parameters of the model that the loop calls, after any copy.",
            refuted_if="the script updates these weights without an optimizer of torch.",
        )


class _Outside(_Trained):
    """Parameters of a model have gradients that are not zero, and nothing updates them."""

    model: str
    is_loaded: bool
    names: Names


class OutsideModel(_Outside, rule="trained_tensors", kind="outside"):
    """They are those of a whole model in training mode."""

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"The {self.model} that the loss depends on is in no optimizer",
            f"At {observed(facts)} backward gave gradients to {count(self.names.count, 'parameter')} of a "
            f"{self.model}. No optimizer holds them, and nothing has changed their weights.",
            module=self.model,
            # Weights from a file may be meant to stay, as those of a network that compares images.
            severity=Severity.WARNING if self.is_loaded else Severity.ERROR,
            evidence=(self.names.count, "parameters"),
            fix=(
                "Give its parameters to the optimizer too. If it is to stay as it is, call `eval()` and "
                "`requires_grad_(False)` on it, which saves its gradients."
            ),
            refuted_if="an optimizer that is not of torch updates it later.",
        )


class TargetModel(_Outside, rule="trained_tensors", kind="target"):
    """They are those of a model that began as a copy of a trained one."""

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"The copy of {self.model} in the loss gets gradients that are not used",
            f"At {observed(facts)} backward gave gradients to {count(self.names.count, 'parameter')} of a "
            f"{self.model} that began with the weights of the trained one. No optimizer holds them, as for a "
            "target network.",
            module=self.model,
            severity=Severity.INFO,
            evidence=(self.names.count, "parameters"),
            fix="Call it under `torch.no_grad()`: that saves its backward and the memory of its gradients.",
            refuted_if="the copy is to be trained: then give its parameters to an optimizer.",
        )


class LeftOut(_Outside, rule="trained_tensors", kind="left_out"):
    """They belong to a model that is trained; ``is_evaluated``: to modules in evaluation mode."""

    is_evaluated: bool
    is_unfrozen: bool

    def _finding(self, facts: Sequence[Self]) -> Finding:
        last = facts[-1]
        names, them = last.names, last.names.verb("it", "them")
        may_be_meant = not last.is_unfrozen and (last.is_loaded or last.is_evaluated)
        history = (
            f" {names.verb('It was', 'They were')} frozen before, and the optimizer was created without "
            f"{them}."
            if last.is_unfrozen
            else ""
        )
        return self.finding(
            f"{names} {names.verb('is', 'are')} not in any optimizer",
            f"At {observed(facts)} backward gave {names} of {last.model} "
            f"{names.verb('a gradient that is', 'gradients that are')} not zero. No optimizer holds "
            f"{them}, and nothing has changed {them}.{history}",
            parameter=names.first[0],
            severity=Severity.WARNING if may_be_meant else Severity.ERROR,
            evidence=(names.count, "parameters"),
            fix=(
                "Add them when they are unfrozen: `optimizer.add_param_group({'params': "
                "layer.parameters()})`."
                if last.is_unfrozen
                else "Create the optimizer from `model.parameters()`. Call `requires_grad_(False)` on "
                "parameters that are to stay as they are."
            ),
            refuted_if="an optimizer that is not of torch updates them later.",
        )


class Replaced(_Trained, rule="trained_tensors", kind="replaced"):
    """The optimizer holds ``stale`` tensors that no module uses, and not these parameters."""

    about = "optimizer"
    optimizer: str
    names: Names
    line: str
    stale: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        names, are = self.names, self.names.verb("is", "are")
        built = (
            f" was built{phrases.at_line(self.line)}, before a module was replaced: it" if self.line else ""
        )
        return self.finding(
            f"{names} {are} not in any optimizer",
            f"{self.optimizer}{built} holds {count(self.stale, 'tensor')} that no module uses any more. "
            f"{names} {names.verb('gets a gradient', 'get gradients')} and {are} never updated.",
            parameter=names.first[0],
            line=self.line,
            severity=Severity.ERROR,
            evidence=(names.count, "parameters"),
            fix="Create the optimizer after the last module was replaced, and after any copy of the model.",
            refuted_if="the script updates these weights without an optimizer of torch.",
        )


class MadeInForward(_Trained, rule="trained_tensors", kind="made_in_forward"):
    """Backward reached parameters of layers that every forward creates, with a matrix if ``is_random``."""

    about = "lines"
    layers: tuple[str, ...]
    lines: tuple[str, ...]
    is_random: bool

    def _finding(self, facts: Sequence[Self]) -> Finding:
        kinds = list(dict.fromkeys(self.layers))
        layers = " and ".join(kinds) if len(kinds) < 3 else listed(kinds, 2)
        is_single = len(self.layers) == 1
        pairs = zip(self.layers, self.lines, strict=True)
        places = [f"{kind}{phrases.at_line(line)}" for kind, line in pairs]
        return self.finding(
            f"{layers} {'is' if is_single else 'are'} created in every forward",
            f"At {observed(facts)} backward gave gradients to the parameters of {listed(places)}, which the "
            "forward had just created in place of those of an earlier step. No optimizer holds them, so they "
            "are never trained.",
            line=self.lines[0],
            severity=Severity.ERROR if self.is_random else Severity.WARNING,
            evidence=(len(self.layers), "layers"),
            fix=(
                f"Create {'it' if is_single else 'them'} in `__init__`: `self.layer = {kinds[0]}(...)`. Call "
                "`self.layer` in `forward`."
            ),
            refuted_if="the layers are to have new weights at each step.",
        )


class NeverStepped(_Trained, rule="trained_tensors", kind="never_stepped"):
    """Gradients of an optimizer with so many parameters are cleared again and again, and it takes no step."""

    about = "optimizer"
    optimizer: str
    line: str
    parameters: int
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.optimizer} never takes a step, and its gradients are cleared",
            f"By step {facts[-1].step} {self.optimizer}{phrases.at_line(self.line)} had taken no step, while "
            f"{self.names} had gradients that are not zero and were cleared again. Nothing has changed these "
            "weights.",
            line=self.line,
            parameter=self.names.first[0],
            evidence=(self.parameters, "parameters"),
            fix="Call `step()` of this optimizer after the backward of its loss.",
            refuted_if="the optimizer begins to take steps later in the run.",
        )


class StateLost(_Trained, rule="trained_tensors", kind="state_lost"):
    """An optimizer starts without the state of the one before, with its parameters and settings."""

    about = "optimizer"
    optimizer: str
    line: str
    restarts: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        where = phrases.at_line(self.line)
        return self.finding(
            f"{self.optimizer} is created anew during training, without its state",
            f"By step {facts[-1].step} {self.optimizer} had been created{where} "
            f"{count(1 + facts[-1].restarts, 'time')} with the same settings for the same parameters, each "
            "after steps of the one before. Moments and step counts start at 0 each time.",
            line=self.line,
            evidence=(facts[-1].restarts, "restarts"),
            fix="Create the optimizer once, before the training loop, and use it in all epochs and steps.",
            refuted_if="each of these optimizers begins a training run of its own.",
        )


class ComputedOnce(_Trained, rule="trained_tensors", kind="computed_once"):
    """A module keeps a tensor that was computed once from a parameter that no module or optimizer holds."""

    about = "attribute"
    model: str
    attribute: str
    shape: list[int]

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"`{self.attribute}` of {self.model} is computed from a parameter, and is none",
            f"At step {self.step} it was the same tensor as at the step before, of shape {self.shape}: the "
            "result of an operation, such as `nn.Parameter(...).to(device)`. The parameter gets a gradient, "
            "and neither the module nor an optimizer holds it: it keeps its first values, and is not saved.",
            parameter=self.attribute,
            severity=Severity.ERROR,
            evidence=(self.attribute, "attribute"),
            fix=(
                "Assign the `nn.Parameter` itself, made on its device as in "
                "`nn.Parameter(torch.zeros(n, device=device))`, or move the whole module."
            ),
            refuted_if="the module recomputes this tensor in a later forward.",
        )


class FrozenParameters(_Trained, rule="trained_tensors", kind="frozen"):
    """The optimizer uses the gradients that parameters had before they were frozen."""

    about = "optimizer"
    optimizer: str
    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        names = self.names
        return self.finding(
            f"{self.optimizer} still updates {names}, which {names.verb('is', 'are')} frozen",
            f"{names} {names.verb('has', 'have')} been trained, and {names.verb('does', 'do')} not "
            f"require a gradient any more. At {observed(facts)} {self.optimizer} used the gradient that was "
            "left, with its moments and weight decay.",
            parameter=names.first[0],
            evidence=(names.count, "parameters"),
            fix="Set `parameter.grad = None` where `requires_grad` is set to False.",
            refuted_if="these weights are equal before and after `optimizer.step()`.",
        )


class SharedModule(_Trained, rule="trained_tensors", kind="shared"):
    """One module is ``count`` children of a container."""

    about = "container"
    container: str
    module: str
    count: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"`{self.container}` holds one {self.module} {self.count} times",
            f"{self.count} children of `{self.container}` are the same {self.module}: they share their "
            "weights, and the model is as deep but has the parameters of one.",
            module=self.container,
            severity=Severity.INFO,
            evidence=(self.count, "children"),
            fix="Build one module for each place: `[Block() for _ in range(n)]`, not `[Block()] * n`.",
            refuted_if="sharing the weights is meant.",
        )


class Untied(_Trained, rule="trained_tensors", kind="untied"):
    """Parameters are trained apart that were one, or that a ``setting`` of the model ties."""

    about = "names"
    names: Names
    setting: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        names = self.names
        cause = (
            f"`{self.setting}` is True" if self.setting else "They were one tensor when the model was built"
        )
        return self.finding(
            f"{names} are no longer tied",
            f"{cause}. At step {self.step} they are {names.count} parameters with gradients of their own, "
            "which the optimizer changes apart from one another.",
            parameter=names.first[0],
            evidence=(names.count, "parameters"),
            fix=(
                "Tie them again before the optimizer is created, after a layer was replaced or resized, "
                "after `load_state_dict(..., assign=True)` and after `to_empty()`: "
                "`model.head.weight = model.embedding.weight`, or `model.tie_weights()`."
            ),
            refuted_if="they are meant to part.",
        )
