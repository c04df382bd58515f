"""The autograd graph below a loss: its nodes by kind, the terms of the loss, and the loss of each sample."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Node = Any
"""A node of the graph; torch's class has no attribute that is read here."""

sequence_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
"""Returns the number of the next node that is made; None where torch has no such function."""


def kinds(names: str) -> frozenset[str]:
    """Return kinds of nodes, of names separated by spaces."""
    return frozenset(names.split())


RESHAPES = kinds(
    "View UnsafeView Reshape ReshapeAlias Transpose T Permute Squeeze Unsqueeze Slice Select Index Clone "
    "ToCopy Alias Contiguous Narrow"
)
"""Kinds of nodes that pass values on in another shape or type."""

MAX_ADDENDS = 4096
"""Nodes above the addends of a loss that are visited: a loop that adds up has one per round."""

_SUM_REDUCTION = 2
_ADDS = kinds("Add Sub")
_PASSES_ON = RESHAPES | {"Mul", "Div", "Neg"}


def kind_of(node: Node | None) -> str:
    """Return the kind of a node without what torch adds: ``Mean`` of ``MeanBackward1``."""
    return "" if node is None else _kind(node.name())


@functools.lru_cache(maxsize=1024)
def _kind(name: str) -> str:
    return re.sub(r"^torch::autograd::|Backward\d*$", "", name)


def inputs_of(node: Node) -> list[Node | None]:
    """Return the nodes below a node, None for an input without a gradient."""
    return [below for below, _ in node.next_functions]


def first_input(node: Node) -> Node | None:
    """Return the node below the first input, None for one without a gradient, or without inputs."""
    return next(iter(inputs_of(node)), None)


def below_shapes(node: Node | None) -> Node | None:
    """Return the node whose values ``node`` has, in another shape or type: itself where it computes."""
    while node is not None and kind_of(node) in RESHAPES:
        node = first_input(node)
    return node


def shape_of(node: Node | None) -> tuple[int, ...] | None:
    """Return the shape of the first output of a node; None where torch does not say."""
    described = getattr(node, "_input_metadata", None)
    shape = getattr(described[0], "shape", None) if described else None
    return None if shape is None else tuple(int(size) for size in shape)


def is_divided(root: Node | None, *, is_scaled: bool = False) -> bool:
    """Return whether a loss is the result of a division or a product, as a microbatch's share of a mean is.

    ``is_scaled`` says that a gradient scaler has multiplied it since.
    """
    if is_scaled and root is not None and kind_of(root) == "Mul":
        root = next((below for below in inputs_of(root) if below is not None), None)
    return kind_of(root) in {"Div", "Mul"}


def addends(root: Node | None) -> int | None:
    """Return how many values a loss adds up: elements below a sum, and terms of additions.

    A mean counts as one value, whatever it is the mean of. None where there are too many nodes to count.
    Only metadata of nodes is read: no saved tensor, whose hooks belong to the script.
    """
    pending, count = [root], 0
    for _ in range(MAX_ADDENDS):
        if not pending:
            return count
        node = pending.pop()
        kind = "" if node is None else _kind(node.name())
        is_sum = kind == "Sum" or getattr(node, "_saved_reduction", None) == _SUM_REDUCTION
        if node is None or not (is_sum or kind in _ADDS or kind in _PASSES_ON):
            count += 1
            continue
        below = [n for n, _ in node.next_functions if n is not None]
        if kind in _ADDS:
            pending += below
        elif is_sum:
            shape = shape_of(below[0]) if below else None
            count += 1 if shape is None else math.prod(shape)
        elif len(below) == 1:
            pending += below
        else:
            count += 1
    return None


MAX_NODES = 64
"""Nodes below a loss that are visited."""

SHOWS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether torch shows the hooks of a saved tensor. Where it does not, as torch 2.9, none is read."""

_ARITHMETIC = kinds("Add Sub Mul Div Neg Mean Sum Stack Cat Where MaskedFill Gather Pow Abs")
"""Nodes that a total loss is made of."""

CLASS_LOSSES = kinds("NllLoss NllLoss2D")
"""Nodes of the loss functions that compare log-probabilities with class indices."""


def terms(root: Node | None) -> list[tuple[str, Node]]:
    """Return kind and node of what a total loss is made of, from ``root`` down, up to the loss functions."""
    nodes, visited = [root], list[tuple[str, Node]]()
    for node in nodes:  # which grow meanwhile
        kind = "" if node is None else _kind(node.name())  # without a call per node
        visited.append((kind, node))
        if len(visited) == MAX_NODES:
            break
        if node is not None and (kind in _ARITHMETIC or kind in RESHAPES):
            nodes += [below for below, _ in node.next_functions]
    return visited


def are_plain(node: Node, *names: str) -> bool:
    """Return whether tensors that a node has saved have no hooks, which belong to the script.

    Unpacking what a hook has packed may compute a checkpointed forward again.
    """
    saved = [getattr(node, f"_raw_saved_{name}", None) for name in names]
    return SHOWS_HOOKS and all(getattr(wrapped, "unpack_hook", wrapped) is None for wrapped in saved)


def single_losses(root: Node | None) -> Tensor | None:
    """Return the terms whose sum or mean is the first loss function below ``root``, ``[N, ...]``.

    Read from what the graph keeps for its backward, so before that. None where torch has no such function
    there (of losses that are written out the terms are not known), or hooks have packed its tensors.
    """
    for kind, node in terms(root):
        if kind in CLASS_LOSSES and are_plain(node, "self", "target"):
            return _of_classes(node._saved_self, node._saved_target, node._saved_ignore_index)
        if kind == "MseLoss" and are_plain(node, "self", "target"):
            differences: Tensor = node._saved_self.detach() - node._saved_target.detach()
            return differences.square()
        if kind == "BinaryCrossEntropyWithLogits" and are_plain(node, "self", "target"):
            operands = node._saved_self.detach(), node._saved_target.detach()
            return functional.binary_cross_entropy_with_logits(*operands, reduction="none")
    return None


@torch.no_grad()
def _of_classes(log_probabilities: Tensor, targets: Tensor, ignored: int) -> Tensor:
    valid = targets != ignored
    if log_probabilities.dim() == 1:
        log_probabilities, targets, valid = log_probabilities[None], targets[None], valid[None]
    picked = log_probabilities.detach().gather(1, targets.where(valid, 0).unsqueeze(1)).squeeze(1)
    return torch.where(valid, -picked, 0.0)
