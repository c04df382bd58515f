"""What loss functions are given: by the graph below them, by its values, and by their targets."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.batches import tensors_in
from backlight.capture.functional_calls import CtcCalls, LossCalls
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import (
    CLASS_LOSSES,
    MAX_NODES,
    RESHAPES,
    Node,
    are_plain,
    below_shapes,
    first_input,
    inputs_of,
    kind_of,
    kinds,
    shape_of,
    terms,
)
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loader_batches import data_of, kind_of_sampler
from backlight.monitors.correctness.model.facts import Fact
from backlight.monitors.correctness.rules import loss_input as facts
from backlight.user_code import user_line

_PROBABILITIES = kinds("Softmax Sigmoid")

_SCORES = kinds(
    "Addmm Mm Bmm Linear Convolution NativeBatchNorm CudnnBatchNorm NativeLayerNorm Relu Tanh Gelu"
)
"""Nodes whose values are no log-probabilities."""

_AFFINE = kinds("Addmm Linear Convolution")
"""Layers of scores per class. Products alone are similarities as well, of which columns may be compared."""

_PRODUCTS = kinds("Mm Bmm")
_CTC = kinds("CtcLoss CudnnCtcLoss")
_DIFFERENCES = kinds("MseLoss SmoothL1Loss HuberLoss")
_OF_ELEMENTS = kinds(
    "Add Sub Mul Div Neg Mean Sum Where Pow Abs Sqrt Log Log1p Exp Cosh Maximum Minimum Clamp Relu"
)
_NOT_PREDICTED = kinds("AccumulateGrad Unsqueeze View Reshape ReshapeAlias Expand Slice Index Select")


class LossGraph(Check):
    """``loss_input``: a loss function was given what it is not made for; see :func:`misuses`."""

    name = "loss_graph"

    def _start(self) -> None:
        self._sizes: set[int] = set()  # samples of the tensors of the last batch

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note how many samples each tensor of the batch has."""
        self._sizes = {len(x) for x in tensors_in(batch) if x.ndim}

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Look at the nodes below each root."""
        if self.due:
            for root in roots:
                if _is_of_no_parameter(root):
                    self.report(facts.LossWithoutParameters(self.step, str(user_line() or "")))
                by_kind = {type(fact): fact for fact in misuses(root.grad_fn, self.step, self._sizes)}
                for fact in by_kind.values():
                    self.report(fact)


def misuses(root: Node | None, step: int, sizes: AbstractSet[int] = frozenset()) -> Iterator[Fact]:
    """Yield each misuse of a loss function below ``root``. Nothing of the graph is kept.

    ``sizes`` are the numbers of samples of the tensors of the batch.
    """
    for kind, node in terms(root):
        if kind in CLASS_LOSSES:
            yield from _below_nll(inputs_of(node)[:1], step)
        elif kind == "LogSoftmax":
            yield from _below_log_softmax(inputs_of(node)[:1], step)
        elif kind == "BinaryCrossEntropyWithLogits" and _source(inputs_of(node)[:1]) == "Sigmoid":
            yield facts.SigmoidTwice(step)
        elif kind in _DIFFERENCES:
            yield from _broadcast(node, step, sizes)
        elif kind == "Gather":
            yield from _gathered(node, step)
        elif kind == "Mul" and _has_attached_advantage(node):
            yield facts.AttachedAdvantage(step)

    for kind, node in _elements(root):
        yield from (_broadcast if kind == "Sub" else _broadcast_product)(node, step, sizes)


def _elements(root: Node | None) -> Iterator[tuple[str, Node]]:
    """Yield differences and products of which a loss is the mean or sum, by functions of single elements.

    A sum along one axis, as that over the samples at risk or over negatives, is meant to compare samples.
    """
    nodes = [root]
    for node in nodes:  # which grows meanwhile
        kind = kind_of(node)
        if kind in {"Sub", "Mul"}:
            yield kind, node
        is_whole = kind not in {"Sum", "Mean"} or shape_of(node) == ()
        if is_whole and len(nodes) < MAX_NODES and (kind in _OF_ELEMENTS or kind in RESHAPES):
            nodes += [below for below in inputs_of(node) if below is not None]


def _has_attached_advantage(product: Node) -> bool:
    """Return whether log-probabilities of choices are multiplied by a difference from a learned value.

    Weights that are made of the same scores, as those of a focal loss, are none, nor are learned weights that
    are no difference from something fixed.
    """
    factors = [_below_sign(node) for node in inputs_of(product)]
    if len(factors) != 2 or None in factors:
        return False
    for choice, weight in (factors, factors[::-1]):
        is_choice = kind_of(choice) in {"Gather", "LogSoftmax"}
        if is_choice and kind_of(weight) == "Sub" and inputs_of(weight).count(None) == 1:
            return _scores(choice) not in set(_nodes_below(weight))
    return False


def _below_sign(node: Node | None) -> Node | None:
    node = below_shapes(node)
    return below_shapes(first_input(node)) if kind_of(node) == "Neg" else node


def _scores(choice: Node) -> Node | None:
    """Return the node whose values became log-probabilities."""
    node: Node | None = choice
    while kind_of(node) in {"Gather", "LogSoftmax", "Sub"} or kind_of(node) in RESHAPES:
        node = first_input(node)
    return node


def _nodes_below(root: Node) -> Iterator[Node]:
    """Yield the first nodes below ``root``."""
    pending = [root]
    for _ in range(MAX_NODES):
        if not pending:
            return
        node = pending.pop(0)
        yield node
        pending += [below for below in inputs_of(node) if below is not None]


def is_multiple(root: Node | None, loss: Node) -> bool:
    """Return whether ``root`` is the value of ``loss``, or a multiple of it."""
    node = root
    for _ in range(MAX_NODES):
        if node is None or node is loss:
            break
        inputs = [node for node in inputs_of(node) if node is not None]
        if len(inputs) != 1 or not (kind_of(node) in RESHAPES or kind_of(node) in {"Mul", "Div"}):
            return False
        node = inputs[0]
    return node is loss


def _below_cast(node: Node | None) -> Node | None:
    """Return the node below a cast, as autocast adds them, which leaves the shape as it is."""
    return first_input(node) if kind_of(node) == "ToCopy" else node


def _is_of_no_parameter(root: torch.Tensor) -> bool:
    """Return whether a loss is a number that was made to require gradients, or a multiple of it."""
    node = root.grad_fn
    while kind_of(node) in {"Mul", "Div"} and len(below := [n for n in inputs_of(node) if n]) == 1:
        node = below[0]
    leaf = getattr(node, "variable", root if node is None else None)
    return leaf is not None and leaf.ndim == 0 and not isinstance(leaf, torch.nn.Parameter)


def _source(nodes: Sequence[Node | None]) -> str:
    """Return the kind of what made the values of the first of ``nodes``.

    torch splits a linear layer whose input is not contiguous, as that behind a recurrent one with
    ``batch_first``, into a product and the addition of the bias.
    """
    node = below_shapes(nodes[0] if nodes else None)
    if kind_of(node) == "Add" and [kind_of(below) for below in inputs_of(node)[1:]] == ["AccumulateGrad"]:
        return "Linear" if kind_of(below_shapes(first_input(node))) in _PRODUCTS else "Add"
    return "Softmax" if _is_softmax(node) else kind_of(node)


def _is_softmax(node: Node | None) -> bool:
    """Return whether a node is a softmax, or one that is written out."""
    kind = kind_of(node)
    if kind == "Exp":
        return kind_of(below_shapes(first_input(node))) == "LogSoftmax"
    if kind == "Div" and len(inputs_of(node)) > 1:
        above, below = (below_shapes(factor) for factor in inputs_of(node)[:2])
        is_sum = kind_of(above) == "Exp" and kind_of(below) == "Sum"
        return is_sum and below_shapes(first_input(below)) is above
    return kind == "Softmax"


def _below_nll(inputs: Sequence[Node | None], step: int) -> Iterator[Fact]:
    direct = _below_cast(inputs[0] if inputs else None)
    if kind_of(direct) == "LogSoftmax":
        yield from _dimension(direct, step)
    node = below_shapes(inputs[0] if inputs else None)
    kind = _source(inputs)
    if kind == "LogSoftmax":
        yield from _below_log_softmax(inputs_of(node)[:1], step)
    elif kind in _PROBABILITIES:
        yield facts.NllOfProbabilities(step, kind.lower())
    elif kind in _SCORES:
        yield facts.NllOfScores(step, kind.lower())


def _dimension(node: Node, step: int) -> Iterator[Fact]:
    """Find log-probabilities that add up over another dimension than that of the classes, the second one."""
    shape, dimension = shape_of(node), _saved_dimension(node)
    if shape is not None and len(shape) > 1 and shape[1] == 1:
        yield facts.OneOutput(step, list(shape))
    elif shape is not None and dimension is not None and len(shape) > 1 and dimension != 1:
        yield facts.SoftmaxDimension(step, dimension, list(shape))


def _gathered(node: Node, step: int) -> Iterator[Fact]:
    """Find log-probabilities of a layer's scores whose sums run over another dimension than the choice."""
    below = _below_cast(first_input(node))
    shape, classes, dimension = shape_of(below), _saved_dimension(node), _saved_dimension(below)
    is_of_layer = kind_of(below) == "LogSoftmax" and _source(inputs_of(below)[:1]) in _AFFINE
    if shape and is_of_layer and classes is not None and dimension is not None and dimension != classes:
        yield facts.SoftmaxDimension(step, dimension, list(shape), "gather", classes)


def _saved_dimension(node: Node | None) -> int | None:
    """Return the dimension that a node works along; torch hands it out without its sign."""
    shape, dimension = shape_of(node), getattr(node, "_saved_dim", None)
    if not shape or dimension is None:
        return None
    return int((dimension - 2**64 if dimension >= 2**63 else dimension) % len(shape))


def _below_log_softmax(inputs: Sequence[Node | None], step: int) -> Iterator[Fact]:
    kind = _source(inputs)
    if kind in _PROBABILITIES:
        yield facts.SoftmaxTwice(step) if kind == "Softmax" else facts.SigmoidBeforeSoftmax(step)


def _broadcast(node: Node | None, step: int, sizes: AbstractSet[int]) -> Iterator[Fact]:
    """Find a difference of N predictions and N targets that was broadcast to N x N, or to N x M.

    The shape of a target leaves no trace in the graph; that of the prediction, ``[N, 1]`` or ``[N]``, and of
    the difference do. A prediction that was reshaped for the purpose, as for pairwise losses, is left out,
    and so is a target of a size that the batch does not have.
    """
    kind = kind_of(node)
    if kind != "Sub" and kind not in _DIFFERENCES:
        return
    inputs = inputs_of(node)
    operands = [node for node in inputs if node is not None]
    if len(operands) != 1:
        return
    prediction = _below_cast(operands[0])
    if kind_of(prediction) == "Expand":
        whole = shape_of(prediction)
        prediction = _below_cast(first_input(prediction))
    elif kind == "Sub":
        whole = shape_of(node)
    else:
        return
    shape = shape_of(prediction)
    if shape is None or whole is None or len(whole) != 2 or kind_of(prediction) in _NOT_PREDICTED:
        return
    n = shape[0] if shape else 0
    m = whole[1] if shape == (n, 1) else whole[0]
    if n > 1 and m > 1 and whole == ((n, m) if shape == (n, 1) else (m, n)) and shape in {(n, 1), (n,)}:
        of, difference = list(shape), list(whole)
        if n == m:
            yield facts.Broadcast(step, of, difference)
        elif {n, m} <= sizes:
            yield facts.DifferentSizes(step, of, difference, [n, m])


def _broadcast_product(node: Node, step: int, sizes: AbstractSet[int]) -> Iterator[Fact]:
    """Find a product of N values of a model and N others that was broadcast to N x N.

    Here the graph holds the shape of the other factor: one of N x N, as a mask over pairs, is meant.
    """
    below = inputs_of(node)
    operands = [factor for factor in below if factor is not None]
    if len(operands) != 1 or kind_of(operands[0]) in _NOT_PREDICTED:
        return
    name = "other" if below[0] is not None else "self"
    factor = getattr(node, f"_saved_{name}", None) if are_plain(node, name) else None
    if factor is None or (whole := shape_of(node)) is None or len(whole) != 2 or whole[0] != whole[1]:
        return
    n, shape = whole[0], shape_of(operands[0])
    if n > 1 and shape is not None and {shape, tuple(factor.shape)} == {(n, 1), (n,)}:
        yield facts.Broadcast(step, list(shape), list(whole))


LOOKS = 4
"""Steps whose losses are observed: the code of a loop rarely changes."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Deviation of a sum of probabilities from 1; that of other types is :data:`HALF_TOLERANCE`."""

HALF_TOLERANCE = 2e-2

CROSS_ENTROPY = "cross_entropy_loss"

PROBABILITY_STEPS = 2
"""Steps at which that is so before it is reported."""

SHOWN_BY_THE_GRAPH = (facts.SoftmaxTwice, facts.SigmoidBeforeSoftmax)
"""Misuses that are reported without their values."""


class Probabilities(Check):
    """Whether every row that cross-entropy, or ``kl_div``, gets is in [0, 1] and adds up to 1.

    The graph shows a softmax right before the loss; a mixture of several shows in its values only.
    """

    name = "probabilities"

    def _start(self) -> None:
        self._calls = LossCalls()
        self._left = LOOKS
        # Tolerance, lowest value and extent of the sums of each call, by function.
        self._readings: dict[str, list[tuple[float, list[Tensor]]]] = {}
        self._steps: dict[str, list[int]] = {}  # by function, at which all its inputs were probabilities

    def forget(self) -> None:
        """Observe no longer."""
        self._calls.stop()
        self._readings = {}

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Observe the loss of this forward."""
        if self._left and torch.is_grad_enabled():
            self._calls.start()

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the loss of the next step."""
        if self._left and self.run.scope.holds(optimizer):
            self._calls.start()

    def loss_given(self, function: str, inputs: Tensor) -> None:
        """Compare each row of the input with a distribution."""
        classes = 1 if function == CROSS_ENTROPY else -1
        is_table = inputs.ndim > 1 and inputs.shape[classes] > 1 and inputs.numel() > 0
        if not is_table or not inputs.is_floating_point():
            return
        with torch.no_grad():
            values = inputs.detach().float()
            extent = [values.amin(), *torch.aminmax(values.sum(classes))]
            tolerance = TOLERANCE.get(inputs.dtype, HALF_TOLERANCE)
            self._readings.setdefault(function, []).append((tolerance, extent))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Report the losses of the step."""
        readings, self._readings = self._readings, {}
        self._calls.stop()
        if not readings or not self._left:
            return
        self._left -= 1
        misused = [fact for root in roots for fact in misuses(root.grad_fn, 0)]
        if any(isinstance(fact, SHOWN_BY_THE_GRAPH) for fact in misused):
            readings.pop(CROSS_ENTROPY, None)
        for function, calls in readings.items():
            then = functools.partial(self._note, function, self.step, [tolerance for tolerance, _ in calls])
            self.when_known(then, *[value for _, extent in calls for value in extent])

    def _note(
        self, function: str, step: int, tolerances: Sequence[float], *values: NDArray[np.generic]
    ) -> None:
        """Report steps from the second one on: at the first, the output of a model may be constant."""
        extents = np.array(values, np.float64).reshape(-1, 3)
        if all(
            lowest >= 0 and max(abs(low - 1), abs(high - 1)) <= tolerance
            for tolerance, (lowest, low, high) in zip(tolerances, extents, strict=True)
        ):
            steps = self._steps.setdefault(function, [])
            steps.append(step)
            is_first = len(steps) == PROBABILITY_STEPS
            for at in steps if is_first else steps[PROBABILITY_STEPS:][-1:]:
                is_class_loss = function == CROSS_ENTROPY
                self.report((facts.ProbabilitiesGiven if is_class_loss else facts.KlOfProbabilities)(at))


class CtcLengths(Check):
    """Whether a target of ``ctc_loss`` has more labels than frames, at every step: one is enough for NaN."""

    name = "ctc_lengths"
    steps = "all"

    def _start(self) -> None:
        self._calls = CtcCalls()

    def forget(self) -> None:
        """Observe no longer."""
        self._calls.stop()

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Observe the calls of a script that has such a loss."""
        if self.due and not self._calls.is_on:
            losses = (kind for root in roots for kind, _ in terms(root.grad_fn))
            if any(kind in _CTC for kind in losses):
                self._calls.start()

    def targets_too_long(self, needed: int, frames: int, count: int, samples: int) -> None:
        """Report targets that no path through their frames gives."""
        self.report(facts.TargetsTooLong(self.step, needed, frames, count, samples))


CLASS_STEPS = 8
"""Steps whose targets are one class before it is reported."""

IGNORED_STEPS = 4
"""Steps all of whose targets are ignored, from the first loss on, before that is reported."""

TARGETS = 1000
"""The same for targets: of a class of 1 %, one in 23,000 data sets shows none among so many."""

_LAYERS = kinds("Addmm Mm Linear Convolution")
"""What makes the scores of a classifier. Those of a contrastive loss are similarities, all of class 0."""


SORTED_CLASSES, SORTED_SAMPLES = 3, 8
"""Classes that follow one another in an epoch, and targets of each step, before they count as sorted."""


@dataclass
class _Epoch:
    """The classes of steps with one class each, in order, in an epoch of a loader that does not shuffle."""

    iterator: weakref.ref[Any]
    order: list[int] = field(default_factory=list)
    steps: int = 0
    is_mixed: bool = False

    def add(self, low: int, high: int, targets: int) -> None:
        """Add a step; one at which a class ends may have two."""
        last = self.order[-1] if self.order else None
        if low == high:
            self.steps += 1
            self.is_mixed = self.is_mixed or (low != last and low in self.order)
            self.order += [low] * (low != last)
        else:
            self.is_mixed = last not in {low, high} or (high if last == low else low) in self.order
        self.is_mixed = self.is_mixed or targets < SORTED_SAMPLES


class LossTargets(Check):
    """Whether all targets that cross-entropy got so far are one class, or come sorted by class.

    A step of several classes ends the check.
    """

    name = "loss_targets"
    steps = "all"

    def _start(self) -> None:
        self._class: int | None = None
        self._is_classified = False
        self._steps = self._targets = self._ignored = self._ignored_steps = 0
        self._is_over = False  # a target of another class has come
        self._epoch: _Epoch | None = None
        self._data = ""

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note an epoch whose order is that of the data set."""
        epoch = self._epoch
        if epoch is None or epoch.iterator() is not iterator or index == 0:
            sampler = kind_of_sampler(getattr(iterator, "_index_sampler", None))
            self._epoch = _Epoch(weakref.ref(iterator)) if sampler == "SequentialSampler" else None
            self._data = data_of(iterator)

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare the targets of the losses below."""
        losses = [
            node
            for root in roots
            for kind, node in terms(root.grad_fn)
            if kind in CLASS_LOSSES and are_plain(node, "target") and _is_classifier(node)
        ]
        if losses:
            self._is_classified = True
            filled = [node for node in losses if node._saved_target.numel()]
            sizes = [node._saved_target.numel() for node in filled]
            values = [value for node in filled for value in _extent(node)]
            self.when_known(functools.partial(self._note, self.step, sizes, self._epoch), *values)
        elif roots and not self._is_classified:
            HUB.remove(self)  # another loss

    def _note(
        self, step: int, sizes: Sequence[int], epoch: _Epoch | None, *values: NDArray[np.generic]
    ) -> None:
        extents = np.array(values, np.int64).reshape(-1, 3)  # lowest and highest class, and how many targets
        extents[:, 2] = sizes - extents[:, 2]
        extents = extents[extents[:, 2] > 0]
        if not len(extents):
            self._note_ignored(step, sum(sizes))
            return
        if self._ignored_steps >= IGNORED_STEPS and not self._steps:
            self.report(facts.TargetsCount(step))
        if epoch is not None and not epoch.is_mixed:
            self._note_order(step, epoch, extents)
        if self._is_over:
            if epoch is None or epoch.is_mixed:
                HUB.remove(self)
            return
        self._class = int(extents[0, 0]) if self._class is None else self._class
        is_reported = self._is_due()
        is_over = bool((extents[:, :2] != self._class).any())
        self._steps += 1
        self._targets += int(extents[:, 2].sum())
        if not is_over and self._is_due() and (not is_reported or self._steps & (self._steps - 1) == 0):
            self.report(facts.OneClass(step, self._class, self._targets, self._steps))
        elif is_over and is_reported:
            self.report(facts.SeveralClasses(step))
        self._is_over = is_over
        if is_over and (epoch is None or epoch.is_mixed):
            HUB.remove(self)

    def _note_order(self, step: int, epoch: _Epoch, extents: NDArray[np.int64]) -> None:
        """Report an epoch in which each class follows the one before."""
        epoch.add(int(extents[:, 0].min()), int(extents[:, 1].max()), int(extents[:, 2].sum()))
        if not epoch.is_mixed and epoch.steps >= CLASS_STEPS and len(epoch.order) >= SORTED_CLASSES:
            self.report(facts.SortedTargets(step, self._data, len(epoch.order), epoch.steps))
            epoch.is_mixed = True

    def _note_ignored(self, step: int, targets: int) -> None:
        """Report losses of ignored targets alone, as long as no target has counted."""
        self._ignored_steps += 1
        self._ignored += targets
        steps = self._ignored_steps
        if not self._steps and steps >= IGNORED_STEPS and steps & (steps - 1) == 0:
            self.report(facts.NoTarget(step, self._ignored, steps))

    def _is_due(self) -> bool:
        return self._steps >= CLASS_STEPS and self._targets >= TARGETS


def _is_classifier(loss: Node) -> bool:
    """Return whether a layer makes the scores."""
    probabilities = below_shapes(first_input(loss))
    if kind_of(probabilities) != "LogSoftmax" or probabilities is None:
        return False
    return _source(inputs_of(probabilities)[:1]) in _LAYERS


@torch.no_grad()
def _extent(loss: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lowest and the highest class among the targets, and how many do not count."""
    targets: Tensor = loss._saved_target.detach()
    index, limits = loss._saved_ignore_index, torch.iinfo(targets.dtype)
    ignored = targets == index
    low = targets.masked_fill(ignored, limits.max).amin()
    # What is ignored is mostly below all classes; torch shows it without its sign.
    high = targets.amax() if not 0 <= index < 2**63 else targets.masked_fill(ignored, limits.min).amax()
    return low, high, ignored.sum()
