"""Rule ``loss_input``: the loss function was given what it is not made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from backlight.findings.limits import Limits
from backlight.monitors.correctness.model.contradictions import contradictions, evidence_of, steps_of
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


class Misuse(NamedTuple):
    """How a misuse of a loss function is reported."""

    severity: Severity
    title: str
    detail: str
    fix: str


MISUSES = {
    "softmax_twice": Misuse(
        Severity.WARNING,
        "Cross-entropy is given the output of softmax",
        "The input of the log-softmax inside the loss is made by a softmax. Cross-entropy expects logits: of "
        "probabilities, its loss cannot approach 0, and its gradients are small.",
        "Return the logits from the model, and apply softmax only where probabilities are needed.",
    ),
    "probabilities": Misuse(
        Severity.WARNING,
        "Cross-entropy is given probabilities",
        "At {steps} steps every row of its input was between 0 and 1 and added up to 1, as a mixture "
        "of softmaxes does. Cross-entropy expects logits: of probabilities, its loss cannot approach 0, and "
        "its gradients are small.",
        "Use `F.nll_loss(torch.log(p), target)` on the probabilities `p`, or mix the logits.",
    ),
    "sigmoid_before_softmax": Misuse(
        Severity.WARNING,
        "Cross-entropy is given the output of a sigmoid",
        "The input of the log-softmax inside the loss is made by a sigmoid. Cross-entropy expects logits: of "
        "values between 0 and 1, its loss cannot approach 0.",
        "Remove the sigmoid. For several labels per sample, use `binary_cross_entropy_with_logits`.",
    ),
    "sigmoid_twice": Misuse(
        Severity.WARNING,
        "The loss applies a sigmoid to the output of a sigmoid",
        "The input of `binary_cross_entropy_with_logits` is made by a sigmoid, and the loss applies another: "
        "no prediction leaves the range from 0.5 to 0.73.",
        "Remove the sigmoid before the loss, or use `binary_cross_entropy`.",
    ),
    "nll_of_probabilities": Misuse(
        Severity.WARNING,
        "`nll_loss` is given probabilities instead of their logarithms",
        "The input of `nll_loss` is made by {made_by}. The loss is then minus the probability of the class.",
        "Use `log_softmax`, or give the logits to `cross_entropy`.",
    ),
    "nll_of_scores": Misuse(
        Severity.ERROR,
        "`nll_loss` is given raw outputs instead of log-probabilities",
        "The input of `nll_loss` is made by {made_by}, without a log-softmax. The loss has no lower bound, "
        "and no class is compared with another.",
        "Use `log_softmax`, or `cross_entropy` in place of `nll_loss`.",
    ),
    "softmax_dimension": Misuse(
        Severity.ERROR,
        "The softmax before `nll_loss` runs over dimension {dimension} instead of the classes",
        "The log-softmax of shape {shape} runs over dimension {dimension}, and `nll_loss` takes its classes "
        "from dimension 1: the probabilities that add up to 1 are those of one class over different samples.",
        "Use `log_softmax(x, dim=1)`, or give the logits to `cross_entropy`.",
    ),
    "one_class": Misuse(
        Severity.WARNING,
        "Every target is class {class_index}",
        "All {targets:,} targets of the {losses} losses that were looked at are class {class_index}. A model "
        "learns to answer it whatever the input is, and its loss falls to 0.",
        "Look at the labels: where they are read, a comparison that is never true, an index that is cut to "
        "an integer, a data set that is sorted by class and not shuffled.",
    ),
    "broadcast": Misuse(
        Severity.ERROR,
        "The loss compares every prediction with every target",
        "A prediction of shape {prediction} was broadcast against its target to a difference of shape "
        "{difference}. The best constant is then the mean of all targets.",
        "Give both the same shape: `prediction.squeeze(1)`, or `target.unsqueeze(1)`.",
    ),
    "sizes": Misuse(
        Severity.ERROR,
        "The inputs and targets of a batch differ in their number of samples",
        "The tensors of a batch have {samples[0]} and {samples[1]} samples. A prediction of shape "
        "{prediction} was broadcast against its target to a difference of shape {difference}.",
        "Let the data set give one target per input, and both sides of the loss the same shape.",
    ),
}
"""Kinds of contradictions, as the instrument names them."""


_REFUTED = {
    "probabilities": "a row of the input does not add up to 1.",
    "one_class": "a batch has a target of another class.",
}


@rule("loss_input", monitor="correctness")
def loss_input(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find losses whose first nodes show an input that the loss function does not expect."""
    found = contradictions(run, "loss_input")
    for kind, misuse in MISUSES.items():
        of_kind = [event for event in found if event.payload["kind"] == kind]
        if not of_kind:
            continue
        if kind == "one_class" and any(event.payload["kind"] == "several_classes" for event in found):
            continue
        steps = steps_of(of_kind)
        facts = {**of_kind[-1].payload, "steps": len(steps)}
        yield Finding(
            severity=misuse.severity,
            title=misuse.title.format_map(facts),
            detail=misuse.detail.format_map(facts),
            subject=Subject(step=steps[0]),
            evidence=(evidence_of(of_kind, kind),),
            fix=misuse.fix,
            refuted_if=_REFUTED.get(kind, "the autograd graph of the loss begins with other operations."),
        )
