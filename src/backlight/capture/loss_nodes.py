"""Nodes of the autograd graph below a loss, by kind and shape, and how many values the loss adds up."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch

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
_PASSES_ON = RESHAPES | {"Mul", "Div", "Neg"}


def kind_of(node: Node | None) -> str:
    """Return the kind of a node without what torch adds: ``Mean`` of ``MeanBackward1``."""
    return "" if node is None else _kind(node.name())


@functools.lru_cache(maxsize=1024)
def _kind(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


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
        kind = kind_of(node)
        below = [one for one in inputs_of(node) if one is not None] if node is not None else []
        if kind in {"Add", "Sub"}:
            pending += below
        elif kind == "Sum" or getattr(node, "_saved_reduction", None) == _SUM_REDUCTION:
            shape = shape_of(below[0]) if below else None
            count += 1 if shape is None else math.prod(shape)
        elif kind in _PASSES_ON and len(below) == 1:
            pending += below
        else:
            count += 1
    return None
