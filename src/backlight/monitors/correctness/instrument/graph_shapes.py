"""What the shapes of all nodes below a loss show: views that move an axis, norms over one value."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.functional_calls import ViewCalls
from backlight.capture.hooks import is_transforming
from backlight.capture.loss_graph import (
    Node,
    are_plain,
    below_shapes,
    first_input,
    inputs_of,
    kind_of,
    kinds,
    shape_of,
)
from backlight.capture.training_threads import outside_modes
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules import graph_shapes as facts
from backlight.monitors.correctness.rules.trained_tensors import PaddingRow

WALKS = 4
"""Graphs that are read: those of the first losses."""

MAX_NODES = 10_000
"""Nodes that are read of a graph."""

MAX_VIEWS = 4
"""Different views that are reported."""

_VIEWS = kinds("View UnsafeView ReshapeAlias")
_SHIFTS = kinds("ConstantPadNd Cat Slice IndexSelect Narrow AsStrided Index Unfold")
"""Around a view, these skew an axis, as those of relative positions: memory order is meant there."""

_ATTENTION = ("ScaledDotProduct", "Bmm", "Expand")  # torch expands the operands of a product of matrices

_SELECTS = kinds("Where MaskedFill")
_INFINITE = kinds("Sqrt Log Div Pow Rsqrt Reciprocal Log2 Log10 Acos Asin")
_SAFE = kinds("Where MaskedFill Clamp ClampMin Maximum")
_PASSES_ON = kinds("Mul Add Sub Neg View Unsqueeze Squeeze Expand ToCopy")
BRANCH_DEPTH = 4
"""Nodes between a selection and what makes a branch infinite."""


def regrouped(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int], int, int]]:
    """Yield the axes of a view that are neither split nor merged: the smallest groups of equal size.

    With each come the numbers of axes of ``before`` before it and after it. Axes of size 1 do not count.
    """
    old, new = ([size for size in shape if size != 1] for shape in (before, after))
    if math.prod(old) != math.prod(new) or not math.prod(old):
        return
    count = len(old)
    while old and new:
        front = count - len(old)
        sources, targets = [old.pop(0)], [new.pop(0)]
        while (p := math.prod(sources)) != (q := math.prod(targets)):
            (sources if p < q else targets).append((old if p < q else new).pop(0))
        if len(sources) > 1 and len(targets) > 1:
            yield sources, targets, front, len(old)


def moved_size(before: Sequence[int], after: Sequence[int], *, attends: bool) -> int:
    """Return the size of an axis that a view moves without a transpose, 0 where there is none.

    Two axes are swapped. Where one size divides the other, a split and a merge give the same sizes, unless
    the view is an operand of an attention (``attends``) whose samples and features stay. Or one axis behind
    that of the samples moves past the parts of another one, as positions past the heads of an attention.
    """
    for sources, targets, front, behind in regrouped(before, after):
        if len(sources) == len(targets) == 2:
            small, large = sorted(sources)
            is_operand = attends and front == behind == 1
            if sources == targets[::-1] and small != large and (large % small or is_operand):
                return sources[0]
        elif front and {len(sources), len(targets)} == {2, 3}:
            for axis, size in enumerate(sources):
                rests = [math.prod(targets[i + 1 :]) for i, other in enumerate(targets) if other == size]
                if rests and math.prod(sources[axis + 1 :]) not in rests:
                    return size
    return 0


@dataclass
class _Padding:
    """A call of an embedding with a padding row, and the gradient of what it returned."""

    weight: Tensor
    index: int
    indices: Tensor
    gradient: Tensor | None = None


class GraphShapes(Check):
    """``loss_input``: reads every node of the first graphs once; the line of a view at the step after."""

    name = "graph_shapes"
    steps = "first"

    def _start(self) -> None:
        self._left = WALKS
        self._views: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._calls = ViewCalls()
        self._first = -1
        self._padding: list[_Padding] = []

    def forget(self) -> None:
        """Observe no longer."""
        self._left = 0
        self._padding.clear()
        self._calls.stop()

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Read the graphs of the first step, and report its views when their lines are known."""
        if self._calls.is_on and self.step > self._first:
            self._calls.stop()
            for (before, after), size in reversed(self._views.items()):  # in the order of the forward
                line = str(self._calls.lines.get((before, after)) or "")
                self.report(facts.MovedAxis(self.step, list(before), list(after), size, line))
        if not self._left or is_transforming() or is_capturing_graph():
            return
        self._left -= 1
        for root in roots:
            for fact in self._facts(root.grad_fn):
                self.report(fact)
        if self._views and not self._calls.is_on:
            self._left, self._first = 0, self.step
            self._calls.start(set(self._views))

    def _facts(self, root: Node | None) -> Iterator[facts.NormOfOneValue]:
        branches = set()
        for node, consumers in nodes_below(root):
            kind = kind_of(node)
            if kind in _VIEWS:
                self._note_view(node, consumers)
            elif kind in {"NativeGroupNorm", "NativeLayerNorm"} and _group(kind, node) == 1:
                yield self._norm(kind, node)
            elif kind == "Embedding":
                self._follow_padding(node)
            elif kind in _SELECTS and (function := infinite_branch(node)):
                branches.add(("where" if kind == "Where" else "masked_fill", function))
        for kind, function in sorted(branches):
            self.record(facts.UnselectedBranch(self.step, kind, function))

    def _follow_padding(self, node: Node) -> None:
        """Note the gradient of what an embedding with a padding row returned."""
        weight = getattr(first_input(node), "variable", None)
        index = node._saved_padding_idx
        if weight is None or not 0 <= index < len(weight) or not are_plain(node, "indices"):
            return
        padding = _Padding(weight, int(index), node._saved_indices.detach())
        self._padding.append(padding)

        def follow(gradients: Sequence[Tensor | None]) -> None:
            if gradients[0] is not None:
                padding.gradient = gradients[0].detach()

        node.register_prehook(follow)

    def backward_end(self) -> None:
        """Compare the padding rows with their gradients, and with those of the positions that they fill."""
        padding, self._padding = self._padding, []
        for row in padding:
            grad = row.weight.grad
            if row.gradient is not None and grad is not None and not grad.is_sparse:
                with outside_modes(), torch.no_grad():
                    is_padding = row.indices == row.index
                    used = (row.gradient != 0).any(-1).logical_and(is_padding).sum()
                    is_fixed = (row.weight[row.index] != 0).any() & ~(grad[row.index] != 0).any()
                    count = used * is_fixed
                self.when_known(functools.partial(self._report_padding, self.step, row), count)

    def _report_padding(self, step: int, row: _Padding, count: NDArray[np.generic]) -> None:
        if int(count) and (name := self.name_of(row.weight)):
            self.report(PaddingRow(step, name, row.index, int(count)))

    def _note_view(self, node: Node, consumers: Sequence[str]) -> None:
        before, after = getattr(node, "_saved_self_sym_sizes", None), shape_of(node)
        if before is None or after is None or len(self._views) == MAX_VIEWS:
            return
        before = tuple(int(size) for size in before)
        size = moved_size(before, after, attends=any(kind.startswith(_ATTENTION) for kind in consumers))
        source = kind_of(below_shapes(first_input(node)))
        is_meant = source in _SHIFTS or "AccumulateGrad" in source or not _SHIFTS.isdisjoint(consumers)
        if size and not is_meant and kind_of(first_input(node)) not in _SHIFTS:
            self._views[before, after] = size

    def _norm(self, kind: str, node: Node) -> facts.NormOfOneValue:
        leaves = [getattr(below, "variable", None) for below in inputs_of(node)[1:]]
        name = next((name for leaf in leaves if leaf is not None and (name := self.name_of(leaf))), "")
        norm = "group norm" if kind == "NativeGroupNorm" else "layer norm"
        return facts.NormOfOneValue(self.step, norm, name, list(shape_of(node) or ()))


def nodes_below(root: Node | None) -> Iterator[tuple[Node, list[str]]]:
    """Yield the nodes of a graph, each with the kinds of the nodes above it that come before."""
    consumers: dict[Node, list[str]] = {} if root is None else {root: []}
    pending = list(consumers)
    for node in pending:  # which grows meanwhile
        for below, _ in node.next_functions:
            if below is not None and below not in consumers and len(pending) < MAX_NODES:
                pending.append(below)
                consumers[below] = []
            if below in consumers:
                consumers[below].append(kind_of(node))
    return iter([(node, consumers[node]) for node in pending])


def _group(kind: str, node: Node) -> int:
    """Return how many values a group of a norm has."""
    if kind == "NativeLayerNorm":
        return math.prod(int(size) for size in node._saved_normalized_shape)
    return int(node._saved_C) // max(int(node._saved_group), 1) * int(node._saved_HxW)


def infinite_branch(selection: Node) -> str:
    """Return the function by which a branch of a selection may become infinite, empty where there is none."""
    pending = [(below, 0) for below in inputs_of(selection)]
    while pending:
        node, depth = pending.pop()
        kind = kind_of(node)
        if kind in _INFINITE and not any(kind_of(below) in _SAFE for below in inputs_of(node)):
            return kind.lower()
        if kind in _PASSES_ON and depth < BRANCH_DEPTH:
            pending += [(below, depth + 1) for below in inputs_of(node)]
    return ""
