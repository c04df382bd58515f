"""Walk of an autograd graph: nodes, edges, and the leaves that it reaches.

A node that Python has accessed keeps a wrapper, and a chain of wrapped nodes is released
by recursion: some tens of thousands of them overflow the stack of a process whose training would
have run. Wrappers that outlive every tensor of the graph and are dropped root first would be safe, but
the end of the user's last tensor cannot be observed. So the walk happens in a forked child, which
sees the same graph at the same addresses, writes the graph to a pipe and exits without releasing
anything; the training process never makes a wrapper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backlight.capture.forked_child import ChildError, in_child

if TYPE_CHECKING:
    import torch

WALK_TIMEOUT_S = 300.0
"""Time after which an unfinished walk is ended."""


class WalkError(RuntimeError):
    """The graph could not be walked; the message says why."""


@dataclass(frozen=True)
class Graph:
    """The nodes that one backward would visit, by index in the order of the walk: roots first."""

    sequence: tuple[int, ...]  # number of each node; -1 for the accumulation of a leaf's gradient
    edges: tuple[tuple[int, ...], ...]  # node per input, -1 where that input needs no gradient
    leaves: dict[int, int]  # the accumulating node by `id` of the leaf tensor

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.sequence)

    def reaches(self, leaf: torch.Tensor) -> bool:
        """Whether backward would arrive at ``leaf``."""
        return id(leaf) in self.leaves

    def below(self, start: int) -> set[int]:
        """Return every node that backward visits from node ``start`` on, itself included."""
        seen, stack = {start}, [start]
        while stack:
            for node in self.edges[stack.pop()]:
                if node >= 0 and node not in seen:
                    seen.add(node)
                    stack.append(node)
        return seen


def walk(roots: Iterable[torch.Tensor]) -> Graph:
    """Walk the graph behind ``roots`` in a forked child; raise WalkError where that fails."""
    tensors = [root for root in roots if root.requires_grad]
    try:
        answer = in_child(lambda: _walk(tensors), WALK_TIMEOUT_S)
    except ChildError as error:
        raise WalkError(f"the walk of the autograd graph {error}") from None
    leaves = {int(leaf): node for leaf, node in answer["leaves"].items()}
    return Graph(tuple(answer["sequence"]), tuple(map(tuple, answer["edges"])), leaves)


def _walk(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    index: dict[Any, int] = {}
    sequence, edges, pending = [], [], []
    leaves: dict[int, int] = {}

    def number(node: Any) -> int:
        found = index.get(node)
        if found is None:
            found = index[node] = len(index)
            pending.append(node)
        return found

    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:  # a leaf
            node = tensor.expand_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        number(node)
    for done, node in enumerate(pending):  # which grows
        is_leaf = node.name().endswith("AccumulateGrad")
        variable = getattr(node, "variable", None) if is_leaf else None
        if variable is not None:
            leaves[id(variable)] = done
        sequence.append(-1 if variable is not None else node._sequence_nr())
        edges.append([-1 if edge is None else number(edge) for edge, _ in node.next_functions])
    return {"sequence": sequence, "edges": edges, "leaves": leaves}
