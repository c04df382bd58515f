"""What was given to a loss function, by the nodes of the autograd graph below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.batches import tensors
from backlight.capture.loss_nodes import (
    RESHAPES,
    Node,
    below_shapes,
    first_input,
    inputs_of,
    kind_of,
    kinds,
    shape_of,
)
from backlight.capture.loss_terms import CLASS_LOSSES, MAX_NODES, terms
from backlight.monitors.correctness.instrument.check import Check
from backlight.user_code import user_line

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

_PROBABILITIES = kinds("Softmax Sigmoid")

_SCORES = kinds(
    "Addmm Mm Bmm Linear Convolution NativeBatchNorm CudnnBatchNorm NativeLayerNorm Relu Tanh Gelu"
)
"""Nodes whose values are no log-probabilities."""

_DIFFERENCES = kinds("MseLoss SmoothL1Loss HuberLoss")
_NOT_PREDICTED = kinds("AccumulateGrad Unsqueeze View Reshape ReshapeAlias Expand Slice Index Select")


class LossGraph(Check):
    """``loss_input``: a loss function was given what it is not made for; see :func:`contradictions_below`."""

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._sizes: set[int] = set()  # samples of the tensors of the last batch

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note how many samples each tensor of the batch has."""
        self._sizes = {len(x) for _, x in tensors(batch) if x.ndim}

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Look at the nodes below each root."""
        if self.due:
            for root in roots:
                if _is_of_no_parameter(root):
                    self.report("no_gradient", self.run.clock.index, kind="leaf", line=str(user_line() or ""))
                for kind, facts in dict(contradictions_below(root.grad_fn, self._sizes)).items():
                    self.report("loss_input", self.run.clock.index, kind=kind, **facts)


def contradictions_below(
    root: Node | None, sizes: AbstractSet[int] = frozenset()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and facts of each misuse of a loss function below ``root``. Nothing of the graph is kept.

    ``sizes`` are the numbers of samples of the tensors of the batch.
    """
    for kind, node in terms(root):
        if kind in CLASS_LOSSES:
            yield from _below_nll(inputs_of(node)[:1])
        elif kind == "LogSoftmax":
            yield from _below_log_softmax(inputs_of(node)[:1])
        elif kind == "BinaryCrossEntropyWithLogits" and _source(inputs_of(node)[:1]) == "Sigmoid":
            yield "sigmoid_twice", {}
        elif kind in _DIFFERENCES:
            yield from _broadcast(node, sizes)
        elif kind in {"Pow", "Abs"}:
            yield from _broadcast(first_input(node), sizes)


def is_multiple(root: Node | None, loss: Node) -> bool:
    """Return whether ``root`` is the value of ``loss``, or a multiple of it."""
    node = root
    for _ in range(MAX_NODES):
        if node is None or node is loss:
            break
        inputs = [one for one in inputs_of(node) if one is not None]
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
    while kind_of(node) in {"Mul", "Div"} and len(below := [one for one in inputs_of(node) if one]) == 1:
        node = below[0]
    leaf = getattr(node, "variable", root if node is None else None)
    return leaf is not None and leaf.ndim == 0 and not isinstance(leaf, torch.nn.Parameter)


def _source(nodes: Sequence[Node | None]) -> str:
    """Return the kind of what made the values of the first of ``nodes``."""
    node = below_shapes(nodes[0] if nodes else None)
    return "Softmax" if _is_softmax(node) else kind_of(node)


def _is_softmax(node: Node | None) -> bool:
    """Return whether a node is a softmax, or one that is written out."""
    kind = kind_of(node)
    if kind == "Exp":
        return kind_of(below_shapes(first_input(node))) == "LogSoftmax"
    if kind == "Div" and len(inputs_of(node)) > 1:
        above, below = (below_shapes(one) for one in inputs_of(node)[:2])
        is_sum = kind_of(above) == "Exp" and kind_of(below) == "Sum"
        return is_sum and below_shapes(first_input(below)) is above
    return kind == "Softmax"


def _below_nll(inputs: Sequence[Node | None]) -> Iterator[tuple[str, dict[str, Any]]]:
    direct = _below_cast(inputs[0] if inputs else None)
    if kind_of(direct) == "LogSoftmax":
        yield from _dimension(direct)
    node = below_shapes(inputs[0] if inputs else None)
    kind = _source(inputs)
    if kind == "LogSoftmax":
        yield from _below_log_softmax(inputs_of(node)[:1])
    elif kind in _PROBABILITIES:
        yield "nll_of_probabilities", {"made_by": kind.lower()}
    elif kind in _SCORES:
        yield "nll_of_scores", {"made_by": kind.lower()}


def _dimension(node: Node) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find log-probabilities that add up over another dimension than that of the classes, the second one."""
    shape, dimension = shape_of(node), getattr(node, "_saved_dim", None)
    if shape is not None and dimension is not None and len(shape) > 1:
        # torch hands out the dimension without its sign.
        dimension = (dimension - 2**64 if dimension >= 2**63 else dimension) % len(shape)
        if dimension != 1:
            yield "softmax_dimension", {"dimension": dimension, "shape": list(shape)}


def _below_log_softmax(inputs: Sequence[Node | None]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = _source(inputs)
    if kind in _PROBABILITIES:
        yield "softmax_twice" if kind == "Softmax" else "sigmoid_before_softmax", {}


def _broadcast(node: Node | None, sizes: AbstractSet[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find a difference of N predictions and N targets that was broadcast to N x N, or to N x M.

    The shape of a target leaves no trace in the graph; that of the prediction, ``[N, 1]`` or ``[N]``, and of
    the difference do. A prediction that was reshaped for the purpose, as for pairwise losses, is left out,
    and so is a target of a size that the batch does not have.
    """
    kind = kind_of(node)
    if kind != "Sub" and kind not in _DIFFERENCES:
        return
    inputs = inputs_of(node)
    known = [one for one in inputs if one is not None]
    if len(known) != 1:
        return
    prediction = _below_cast(known[0])
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
    facts = {"prediction": list(shape), "difference": list(whole)}
    if n > 1 and m > 1 and whole == ((n, m) if shape == (n, 1) else (m, n)) and shape in {(n, 1), (n,)}:
        if n == m:
            yield "broadcast", facts
        elif {n, m} <= sizes:
            yield "sizes", {**facts, "samples": [n, m]}
