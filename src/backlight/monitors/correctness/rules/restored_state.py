"""Rule ``not_restored``: what a checkpoint holds, and the training run does not begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from backlight.findings import phrases
from backlight.findings.limits import Limits
from backlight.findings.phrases import at_line
from backlight.monitors.correctness.model.facts import (
    Fact,
    Names,
    facts_by_kind,
    facts_of,
    finding_on,
    observed,
)
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@rule("not_restored", monitor="correctness")
def not_restored(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find states that match or change nothing, lost states and ties, other weights, and garbage."""
    lines = {fact.line for fact in facts_of(run, OtherState)}
    for facts in facts_by_kind(run, "not_restored"):
        if isinstance(facts[0], OwnState):
            facts = [fact for fact in facts if fact.line not in lines]  # noqa: PLW2901
        if facts and not isinstance(facts[0], OtherState):
            yield finding_on(facts)


class NothingLoaded(Fact, rule="not_restored", kind="nothing_loaded"):
    """No key of a state belongs to the module that loaded it: it has ``given``, the module ``expected``."""

    model: str
    count: int
    given: str
    expected: str
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model}.load_state_dict loads nothing",
            f"None of the {count(self.count, 'key')} of the state{at_line(self.line)} is one of "
            f"{self.model}: it has `{self.given}`, and the model `{self.expected}`. With `strict=False` this "
            "raises no error, and the training starts from scratch.",
            module=self.model,
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.given, "unexpected key"),
            fix="Rename the keys (a wrapper adds a prefix such as `module.`), and drop `strict=False`.",
            refuted_if="the weights before and after `load_state_dict` differ.",
        )


class Renamed(Fact, rule="not_restored", kind="renamed"):
    """A state has ``count`` of the ``total`` tensors of a module under other names: they are not loaded."""

    model: str
    count: int
    total: int
    given: str
    expected: str
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model}.load_state_dict leaves out {count(self.count, 'tensor')} that the state has",
            f"The state{at_line(self.line)} has {self.count} of the {self.total} tensors of {self.model} "
            f"under other names: `{self.given}`, where the model has `{self.expected}`. With `strict=False` "
            "this raises no error. At the first step these weights are not those of the state.",
            module=self.model,
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.given, "unexpected key"),
            fix=(
                f"Rename the keys, `{self.given}` to `{self.expected}` and so on (wrappers insert `module.` "
                "and `_orig_mod.`), and drop `strict=False`."
            ),
            refuted_if="these weights are meant to begin as they were initialised.",
        )


class WeightsNotRestored(Fact, rule="not_restored", kind="weights"):
    """An optimizer goes on from a state, and its weights are unrelated to those of the checkpoint."""

    optimizer: str
    count: int
    names: Names
    cosine: float
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"The state of {self.optimizer} is restored, and its weights are not",
            f"{self.optimizer} begins at step {self.step} with the moments of a saved run. The checkpoint"
            f"{at_line(self.line)} holds all {self.count} tensors that it trains, and {self.names}, every "
            f"matrix that is compared, are unrelated to those (largest cosine "
            f"{phrases.number(self.cosine)}).",
            parameter=self.names.first[0],
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.cosine, "cosine"),
            fix=(
                "Load the weights into the model that the optimizer holds, with `model.load_state_dict`, and "
                "build no other model after that."
            ),
            refuted_if="new weights are to be trained with the moments of others.",
        )


class StatisticsNotRestored(Fact, rule="not_restored", kind="statistics"):
    """Batch norms have the weights of a checkpoint, and not its statistics: those of ``present`` batches.

    ``is_off`` is whether they are in evaluation mode, in which they never get any.
    """

    model: str
    names: Names
    saved: int
    present: int
    is_off: bool
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"The batch norm statistics of the checkpoint are not restored in {self.model}",
            f"The weights are those of the checkpoint{at_line(self.line)}, whose statistics are of "
            f"{self.saved:,} batches. At step {self.step} those of {self.names} are of {self.present}. "
            + (
                "In evaluation mode they normalise with the values that they were built with."
                if self.is_off
                else "They are estimated anew; an evaluation before that is not one of the model."
            ),
            module=self.names.first[0],
            line=self.line,
            severity=Severity.WARNING if self.is_off else Severity.INFO,
            evidence=(self.saved, "batches"),
            fix=(
                "Load the whole state with `model.load_state_dict(state)`: `named_parameters()` does not "
                "have `running_mean`, `running_var` and `num_batches_tracked`."
            ),
            refuted_if="the statistics are to be estimated on the new data.",
        )


class Overwritten(Fact, rule="not_restored", kind="overwritten"):
    """Weights at the first step are unrelated to those that were loaded: their largest ``cosine``."""

    names: Names
    cosine: float

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            "Loaded weights are overwritten before the first step",
            f"At step {self.step} {self.names}, every matrix that is "
            f"compared, are unrelated to what `load_state_dict` put there (largest cosine "
            f"{phrases.number(self.cosine)}), as if they had been initialised again.",
            parameter=self.names.first[0],
            evidence=(self.cosine, "cosine"),
            fix="Load the checkpoint after the code that initialises (`init_weights`, `reset_parameters`).",
            refuted_if="the weights at the first forward are those of the checkpoint.",
        )


class OptimizerState(Fact, rule="not_restored", kind="optimizer_state"):
    """An optimizer without a state begins to train loaded weights, and the checkpoint has its state."""

    optimizer: str
    count: int
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"The state of {self.optimizer} in the checkpoint is not restored",
            f"The checkpoint{at_line(self.line)} holds the state of an optimizer with the same settings "
            f"and {count(self.count, 'parameter')} of the same shapes. The weights were loaded; "
            f"{self.optimizer} takes its first step with an empty state: its moments start from zero.",
            line=self.line,
            evidence=(self.count, "parameters"),
            fix='Call `optimizer.load_state_dict(checkpoint["optimizer"])` before the first step.',
            refuted_if=(
                "a new training run begins here with these weights, and not the one that was interrupted."
            ),
        )


class RateReplaced(Fact, rule="not_restored", kind="rate"):
    """``load_state_dict`` replaced the learning rate that an optimizer was built with."""

    optimizer: str
    built: float
    loaded: float
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        built, loaded = phrases.number(self.built), phrases.number(self.loaded)
        return self.finding(
            f"The learning rate of the checkpoint, {loaded}, replaces that of the script, {built}",
            f"{self.optimizer} was built with a learning rate of {built}. Its `load_state_dict`"
            f"{at_line(self.line)} set it to {loaded}, as it was saved, and no schedule began at {built}: "
            f"the first step is taken with {loaded}.",
            line=self.line,
            # A rate that a loop lowers by hand is saved lower than it began.
            severity=Severity.WARNING if self.loaded > self.built else Severity.INFO,
            evidence=(self.loaded, "learning rate"),
            fix=(
                'Set `group["lr"]` of each group after `load_state_dict`, or build the optimizer with the '
                "rate that the run is to go on with."
            ),
            refuted_if="the training run is to go on with the rate of the checkpoint.",
        )


class PartNotRestored(Fact, rule="not_restored", kind="part"):
    """The optimizer of a checkpoint goes on, and a schedule or a scaler whose state it holds begins anew.

    ``saved`` and ``present`` are values of its attribute ``name``.
    """

    part: str
    name: str
    saved: float
    present: float
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        saved, present = phrases.number(self.saved), phrases.number(self.present)
        is_scaler, is_average = self.part == "GradScaler", self.name == "n_averaged"
        return self.finding(
            f"The state of {self.part} in the checkpoint is not restored",
            f"The checkpoint{at_line(self.line)} holds the state of {self.part} with `{self.name}` {saved}, "
            "and its optimizer has been loaded. "
            + (
                f"The scaler begins at {present} again: it skips steps until it has found its scale."
                if is_scaler
                else "The average begins anew, with the weights of the model at its first update."
                if is_average
                else f"The schedule begins at {present} again, and so does the learning rate."
            ),
            line=self.line,
            severity=Severity.INFO if is_scaler else Severity.WARNING,
            evidence=(self.saved, self.name),
            fix=(
                'Call `scaler.load_state_dict(checkpoint["scaler"])` before the first step.'
                if is_scaler
                else 'Call `average.load_state_dict(checkpoint["average"])` before the first step.'
                if is_average
                else 'Call `scheduler.load_state_dict(checkpoint["scheduler"])` before the first step.'
            ),
            refuted_if=(
                f"the training run is to begin a new {'average' if is_average else 'schedule'} with the "
                "moments of the last one."
            ),
        )


class OwnState(Fact, rule="not_restored", kind="own_state"):
    """A module loaded a state that holds the module's own tensors."""

    model: str
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.model}.load_state_dict is given its own tensors, and changes nothing",
            f"At {observed(facts)} the state{at_line(self.line)} held the memory of the parameters that it "
            "was loaded into. `state_dict()` returns references: a state that is kept without a copy changes "
            "with every step, and a target that loads itself, or shares the tensors of the trained network, "
            "never differs from what it is.",
            module=self.model,
            line=self.line,
            evidence=(self.line, "line"),
            fix=(
                "Keep `copy.deepcopy(model.state_dict())` of the weights that are to come back; load a "
                "target from the network that is trained."
            ),
            refuted_if="a parameter of the module has another value after this call than before it.",
        )


class OtherState(Fact, rule="not_restored", kind="other_state"):
    """A line that loaded a module's own state has loaded another one since."""

    line: str


class UntiedWhenLoaded(Fact, rule="not_restored", kind="untied"):
    """Parameters are one tensor in the checkpoint, and several in the module that loads it."""

    model: str
    parameters: tuple[str, ...]
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        names = self.parameters
        return self.finding(
            f"{phrases.parameters(names, len(names))} are tied in the checkpoint only",
            f"The checkpoint holds one tensor under these names. {self.model} loaded it{at_line(self.line)} "
            f"into {len(names)} parameters, which the optimizer changes apart from one another.",
            parameter=names[0],
            line=self.line,
            evidence=(len(names), "parameters"),
            fix=(
                "Tie them again before the optimizer is created: "
                "`model.head.weight = model.embedding.weight`."
            ),
            refuted_if="they are meant to part, as copies that begin with one matrix.",
        )


class LeftEmpty(Fact, rule="not_restored", kind="left_empty"):
    """Parameters or buffers have the values of the memory that ``to_empty`` gave them."""

    model: str
    names: Names
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        was = self.names.verb("was", "were")
        return self.finding(
            f"{self.names} {was} never initialised after `to_empty()`",
            f"{self.model}.to_empty(){at_line(self.line)} allocates memory and writes nothing to it. At "
            f"step {self.step} {self.names} {self.names.verb('has', 'have')} the values that the memory had. "
            "(A state holds no buffer that was registered with `persistent=False`.)",
            parameter=self.names.first[0],
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.names.count, "tensors"),
            fix=(
                "Compute these values after `to_empty()`, as `init_weights` or `reset_parameters` of the "
                "module may do, or build the model on its device."
            ),
            refuted_if="nothing reads these tensors.",
        )
