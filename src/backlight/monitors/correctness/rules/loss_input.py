"""Rule ``loss_input``: the loss function was given what it is not made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from backlight.findings.limits import Limits
from backlight.monitors.correctness.model.facts import Fact, facts_of, finding_on, steps_of
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("loss_input", monitor="correctness")
def loss_input(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find losses whose first nodes show an input that the loss function does not expect."""
    for kind in Misuse.__subclasses__():
        facts = facts_of(run, kind)
        ended = _ENDED_BY.get(kind)
        if facts and not (ended is not None and facts_of(run, ended)):
            yield finding_on(facts)


class Misuse(Fact):
    """A misuse of a loss function, with the texts of its finding: fields of the last fact are filled in."""

    severity: ClassVar[Severity] = Severity.WARNING
    title: ClassVar[str]
    detail: ClassVar[str]
    fix: ClassVar[str]
    refuted_if: ClassVar[str] = "the autograd graph of the loss begins with other operations."

    def _finding(self, facts: Sequence[Self]) -> Finding:
        values = {**vars(facts[-1]), "steps": len(steps_of(facts))}
        return self.finding(
            self.title.format_map(values),
            self.detail.format_map(values),
            severity=self.severity,
            evidence=(self.kind,),
            fix=self.fix.format_map(values),
            refuted_if=self.refuted_if,
        )


class SoftmaxTwice(Misuse, rule="loss_input", kind="softmax_twice"):
    """The input of cross-entropy is made by a softmax."""

    title = "Cross-entropy is given the output of softmax"
    detail = (
        "The input of the log-softmax inside the loss is made by a softmax. Cross-entropy expects logits: of "
        "probabilities, its loss cannot approach 0, and its gradients are small."
    )
    fix = "Return the logits from the model, and apply softmax only where probabilities are needed."


class ProbabilitiesGiven(Misuse, rule="loss_input", kind="probabilities"):
    """All values that cross-entropy was given were probabilities."""

    title = "Cross-entropy is given probabilities"
    detail = (
        "At {steps} steps every row of its input was between 0 and 1 and added up to 1, as a mixture "
        "of softmaxes does. Cross-entropy expects logits: of probabilities, its loss cannot approach 0, and "
        "its gradients are small."
    )
    fix = "Use `F.nll_loss(torch.log(p), target)` on the probabilities `p`, or mix the logits."
    refuted_if = "a row of the input does not add up to 1."


class KlOfProbabilities(Misuse, rule="loss_input", kind="kl_of_probabilities"):
    """All values that ``kl_div`` was given as its input were probabilities."""

    title = "`kl_div` is given probabilities where it expects their logarithms"
    detail = (
        "At {steps} steps every row of its input was between 0 and 1 and added up to 1. `kl_div(input, "
        "target)` computes `target * (log(target) - input)`: of probabilities it has no minimum where both "
        "agree, and may fall below 0."
    )
    fix = "Give it `log_softmax(scores, -1)` as the input; the target stays probabilities."
    refuted_if = "a row of the input has a value below 0."


class AttachedAdvantage(Misuse, rule="loss_input", kind="advantage"):
    """Log-probabilities are multiplied by a difference from a learned value, which has a gradient."""

    title = "The advantage in the policy loss is not detached"
    detail = (
        "At {steps} steps log-probabilities of choices were multiplied by a difference of which one side, "
        "such as the value of a critic, has a gradient. The policy loss then trains the critic as well, away "
        "from what it is to predict."
    )
    fix = "Detach the baseline in this loss: `(returns - values.detach()) * log_probabilities`."
    refuted_if = "no parameter of the baseline gets a gradient from the policy loss alone."


class RowsApart(Misuse, rule="loss_input", kind="rows_apart"):
    """Between loader and loss the rows of ``moved`` come into another order, those of ``fixed`` do not."""

    moved: str
    fixed: str
    samples: int

    title = "The {moved} of a batch are permuted, and its {fixed} are not"
    detail = (
        "At {steps} steps the {samples} {moved} were those that the loader gave, in another order, and the "
        "{fixed} were in the order of the loader: each sample is learned with the target of another."
    )
    fix = "Index both with the same permutation, or neither."
    refuted_if = "the outputs are brought into the order of the targets before the loss."


class LoadersApart(Misuse, rule="loss_input", kind="loaders_apart"):
    """The inputs of a step are those of one loader, and the targets those of another that shuffles apart.

    ``input_index`` and ``target_index`` are the first samples of the two batches.
    """

    inputs: str
    targets: str
    input_index: int
    target_index: int

    title = "Inputs and targets come from two loaders that shuffle apart"
    detail = (
        "The model was given batches of {inputs}, and its loss compared with batches of {targets}, of the "
        "same length. Both loaders shuffle on their own: at step {step} the first sample was number "
        "{input_index} of the one and number {target_index} of the other."
    )
    fix = "Give inputs and targets of a sample as one item of one data set, `TensorDataset(inputs, targets)`."
    refuted_if = "any target fits any input, as where only their distributions are compared."


class OneOutput(Misuse, rule="loss_input", kind="one_output"):
    """The softmax of the loss runs over one class."""

    shape: list[int]

    severity = Severity.ERROR
    title = "Cross-entropy over a single class is always 0"
    detail = (
        "The log-softmax of shape {shape} has one class: its probability is 1 whatever the output is, so "
        "that the loss and every gradient are 0."
    )
    fix = "Use `binary_cross_entropy_with_logits` for one output, or give the model one output per class."
    refuted_if = "dimension 1 of the input of the loss is larger than 1."


class NoTarget(Misuse, rule="loss_input", kind="no_target"):
    """All ``targets`` of so many losses are ignored."""

    targets: int
    losses: int

    severity = Severity.ERROR
    title = "Not one target counts: all of them are ignored"
    detail = (
        "All {targets:,} targets of the first {losses} steps have the value that the loss ignores "
        "(`ignore_index`). The model learns nothing, whatever the loss shows."
    )
    fix = (
        "Look at the labels of one batch: a template or an answer that the collator does not find in the "
        "tokens, a prompt that fills the whole length, padding that is also a token, or the values of a mask "
        "that are compared with classes that it does not have."
    )
    refuted_if = "a batch has a target that counts."


class SigmoidBeforeSoftmax(Misuse, rule="loss_input", kind="sigmoid_before_softmax"):
    """The input of cross-entropy is made by a sigmoid."""

    title = "Cross-entropy is given the output of a sigmoid"
    detail = (
        "The input of the log-softmax inside the loss is made by a sigmoid. Cross-entropy expects logits: of "
        "values between 0 and 1, its loss cannot approach 0."
    )
    fix = "Remove the sigmoid. For several labels per sample, use `binary_cross_entropy_with_logits`."


class SigmoidTwice(Misuse, rule="loss_input", kind="sigmoid_twice"):
    """The input of ``binary_cross_entropy_with_logits`` is made by a sigmoid."""

    title = "The loss applies a sigmoid to the output of a sigmoid"
    detail = (
        "The input of `binary_cross_entropy_with_logits` is made by a sigmoid, and the loss applies another: "
        "no prediction leaves the range from 0.5 to 0.73."
    )
    fix = "Remove the sigmoid before the loss, or use `binary_cross_entropy`."


class NllOfProbabilities(Misuse, rule="loss_input", kind="nll_of_probabilities"):
    """The input of ``nll_loss`` is made by what gives probabilities."""

    made_by: str

    title = "`nll_loss` is given probabilities instead of their logarithms"
    detail = (
        "The input of `nll_loss` is made by {made_by}. The loss is then minus the probability of the class."
    )
    fix = "Use `log_softmax`, or give the logits to `cross_entropy`."


class NllOfScores(Misuse, rule="loss_input", kind="nll_of_scores"):
    """The input of ``nll_loss`` is made by what gives no log-probabilities."""

    made_by: str

    severity = Severity.ERROR
    title = "`nll_loss` is given raw outputs instead of log-probabilities"
    detail = (
        "The input of `nll_loss` is made by {made_by}, without a log-softmax. The loss has no lower bound, "
        "and no class is compared with another."
    )
    fix = "Use `log_softmax`, or `cross_entropy` in place of `nll_loss`."


class SoftmaxDimension(Misuse, rule="loss_input", kind="softmax_dimension"):
    """The log-softmax below a loss runs over another dimension than that of the classes."""

    dimension: int
    shape: list[int]
    loss: str = "nll_loss"
    classes: int = 1

    severity = Severity.ERROR
    title = "The softmax before `{loss}` runs over dimension {dimension} instead of the classes"
    detail = (
        "The log-softmax of shape {shape} runs over dimension {dimension}, and `{loss}` takes its classes "
        "from dimension {classes}: what adds up to 1 are probabilities of one class over different samples."
    )
    fix = "Use `log_softmax(x, dim={classes})`, or give the logits to `cross_entropy`."


class OneClass(Misuse, rule="loss_input", kind="one_class"):
    """All ``targets`` of so many losses are one class."""

    class_index: int
    targets: int
    losses: int

    title = "Every target is class {class_index}"
    detail = (
        "All {targets:,} targets of the {losses} losses that were looked at are class {class_index}. A model "
        "learns to answer it whatever the input is, and its loss falls to 0."
    )
    fix = (
        "Look at the labels: where they are read, a comparison that is never true, an index that is cut to "
        "an integer, a data set that is sorted by class and not shuffled."
    )
    refuted_if = "a batch has a target of another class."


class SortedTargets(Misuse, rule="loss_input", kind="sorted"):
    """Steps of one class each follow one another class by class, in an epoch of a loader."""

    data: str
    classes: int
    batches: int

    title = "The batches come sorted by class"
    detail = (
        "By step {step}, {batches} batches of an epoch of {data} held targets of one class each, {classes} "
        "classes one after the other, and none came back. The loader does not shuffle: the model learns each "
        "class and forgets the one before."
    )
    fix = "Create the loader with `shuffle=True`, or shuffle the data once before the training."
    refuted_if = "a batch in the middle of the epoch has targets of several classes."


class TargetsTooLong(Misuse, rule="loss_input", kind="ctc"):
    """``count`` of the targets of ``ctc_loss`` need more frames than there are: so many, of one of them."""

    needed: int
    frames: int
    count: int
    samples: int

    severity = Severity.ERROR
    title = "A target of `ctc_loss` needs {needed} frames, and has {frames}"
    detail = (
        "Some targets are longer than their input, {count} of {samples} in the last such batch recorded: a "
        "label takes a frame, and two that are equal one between them. Their loss is infinite, and its "
        "gradients make every weight NaN."
    )
    fix = (
        "Leave out samples whose target is longer than the output of the model (after its strides and "
        "poolings), or pass `zero_infinity=True`."
    )
    refuted_if = "the loss of that batch is finite."


class Broadcast(Misuse, rule="loss_input", kind="broadcast"):
    """A prediction was broadcast against its target to a matrix of differences."""

    prediction: list[int]
    difference: list[int]

    severity = Severity.ERROR
    title = "The loss compares every prediction with every target"
    detail = (
        "A prediction of shape {prediction} was broadcast against its target to a matrix of shape "
        "{difference}. The best constant is then the mean of all targets."
    )
    fix = "Give both the same shape: `prediction.squeeze(1)`, or `target.unsqueeze(1)`."


class DifferentSizes(Misuse, rule="loss_input", kind="sizes"):
    """The same, of a prediction and a target with different numbers of samples."""

    prediction: list[int]
    difference: list[int]
    samples: list[int]

    severity = Severity.ERROR
    title = "The inputs and targets of a batch differ in their number of samples"
    detail = (
        "The tensors of a batch have {samples[0]} and {samples[1]} samples. A prediction of shape "
        "{prediction} was broadcast against its target to a difference of shape {difference}."
    )
    fix = "Let the data set give one target per input, and both sides of the loss the same shape."


class ShiftedTwice(Misuse, rule="loss_input", kind="shifted"):
    """Every target is the token ``shift`` places after that of its prediction."""

    shift: int

    severity = Severity.ERROR
    title = "The model learns to predict the token {shift} places ahead"
    detail = (
        "At {steps} observed steps each target of cross-entropy is the input token {shift} places after that "
        "of its prediction, and none is the next token. Labels that are shifted already are shifted again "
        "inside a model that is given them as `labels`."
    )
    fix = "Give the model `labels=input_ids`, with -100 where no loss is wanted, and let it shift them."
    refuted_if = "the prediction of tokens further ahead is meant."


class EndIgnored(Misuse, rule="loss_input", kind="end_ignored"):
    """Sequences end with the token that is also the padding, whose target is ignored: ``ends`` so far."""

    token: int
    ends: int

    title = "The end of every sequence is ignored as if it were padding"
    detail = (
        "Token {token} fills what the attention mask leaves out, and {ends} sequences end with it as well, "
        "inside of the mask. Its target is ignored in each of them, and in no other place does it count: the "
        "model never learns to end a sequence."
    )
    fix = (
        "Use a padding token of its own, or set the labels to -100 by the attention mask instead of "
        "`labels == tokenizer.pad_token_id`."
    )
    refuted_if = "the model is not to learn where a sequence ends."


class SeveralClasses(Fact, rule="loss_input", kind="several_classes"):
    """A target of another class came after :class:`OneClass` was reported."""


class TargetsCount(Fact, rule="loss_input", kind="targets_count"):
    """A target that counts came after :class:`NoTarget` was reported."""


_ENDED_BY: dict[type[Fact], type[Fact]] = {OneClass: SeveralClasses, NoTarget: TargetsCount}
"""Facts that hold until another one is recorded."""


class LossWithoutParameters(Fact, rule="no_gradient", kind="leaf"):
    """A loss is a number that was made to require gradients: the rule belongs to the monitor ``health``."""

    line: str
