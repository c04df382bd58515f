"""Facts of the graph of a loss: moved axes, norms over one value, cut states; for ``loss_input``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from backlight.monitors.correctness.model.facts import Fact
from backlight.monitors.correctness.rules.loss_input import Misuse
from backlight.records import Finding, Severity


class MovedAxis(Misuse, rule="loss_input", kind="moved_axis"):
    """A view of ``before`` as ``after`` moves the axis of ``size`` values, as only a transpose can."""

    before: list[int]
    after: list[int]
    size: int
    line: str = ""

    def _finding(self, facts: Sequence[Self]) -> Finding:
        views = dict.fromkeys(
            f"{fact.before} as {fact.after}" + (f" at {fact.line}" if fact.line else "") for fact in facts
        )
        return self.finding(
            f"A view moves an axis of {self.size} values as if it were a transpose",
            f"Tensors are viewed so that an axis changes its place: {', '.join(views)}. A view keeps values "
            f"in the order of memory: an index of the axis of {self.size} values selects others than "
            "before, so that positions, features or samples are mixed.",
            evidence=(self.kind,),
            fix=(
                "Move an axis with `transpose` or `permute`, and use `view` to split or merge neighbouring "
                "axes alone: `x.view(B, T, H, D).transpose(1, 2)`, `y.transpose(1, 2).reshape(B, T, H * D)`."
            ),
            refuted_if="the values are meant to be grouped anew in the order of memory.",
            line=self.line,
        )


class NormOfOneValue(Misuse, rule="loss_input", kind="norm_of_one_value"):
    """A norm over groups of one value, of inputs of ``shape``; ``name`` is its weight."""

    norm: str
    name: str
    shape: list[int]

    severity = Severity.ERROR

    def _finding(self, facts: Sequence[Self]) -> Finding:
        of = f"The {self.norm} of `{self.name}`" if self.name else f"A {self.norm}"
        return self.finding(
            f"A {self.norm} is over groups of one value: its output is always the bias",
            f"{of} has inputs of shape {self.shape} and normalises groups of a single value. A value less "
            "its own mean is 0, whatever it is, and nothing in front of the norm gets a gradient through it.",
            severity=self.severity,
            evidence=(self.kind,),
            fix="Normalise over more values: fewer groups, the axis of features, or the norm before pooling.",
            refuted_if="other inputs of the norm have more than one value per group.",
            parameter=self.name,
        )


class StateWithoutGraph(Misuse, rule="loss_input", kind="state_without_graph"):
    """Each of the ``calls`` of a recurrent layer in one loss, but the first, got its last state detached."""

    name: str
    layer: str
    calls: int
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        layer = f"`{self.name}` ({self.layer})" if self.name else self.layer
        return self.finding(
            f"No gradient passes from one call of {layer} to the one before",
            f"Within one loss it is called {self.calls} times{f' at {self.line}' if self.line else ''}, and "
            "each call but the first gets the state that the last one returned, detached from its graph. "
            "Nothing is propagated back through time: it cannot learn what depends on earlier steps.",
            evidence=(self.calls, "calls"),
            fix="Detach the state once per window of truncated backpropagation, in front of its first call.",
            refuted_if="gradients over a single time step are meant.",
            line=self.line,
            module=self.name,
        )


class SamplesAsTime(Misuse, rule="loss_input", kind="samples_as_time"):
    """A layer takes the first axis of ``shape`` as time, and the loss has one row for each of its entries."""

    name: str
    layer: str
    shape: list[int]
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        layer = f"`{self.name}` ({self.layer})" if self.name else self.layer
        return self.finding(
            f"{layer} takes the {self.shape[0]} samples of a batch as time",
            f"Its input has shape {self.shape}{f' at {self.line}' if self.line else ''}, and with "
            f"`batch_first=False` axis 0 is the time. The loss has {self.shape[0]} rows, one for each entry "
            "of that axis: these are samples, and the output of each depends on the others.",
            evidence=(self.shape[0], "samples"),
            fix="Create the layer with `batch_first=True`, or give it `x.transpose(0, 1)`.",
            refuted_if="the layer is to relate the samples of a batch, or each time step has one target.",
            line=self.line,
            module=self.name,
        )


class UnselectedBranch(Fact, rule="non_finite", kind="branch", event="graph"):
    """``by`` leaves out values of a branch that ``function`` makes: the rule belongs to ``health``."""

    by: str
    function: str
