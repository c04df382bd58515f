"""Walk of an autograd graph: nodes, edges, and the leaves that it reaches.

A node that Python has accessed keeps a wrapper, and a chain of wrapped nodes is released
by recursion: some tens of thousands of them overflow the stack of a process whose training would
have run. Wrappers that outlive every tensor of the graph and are dropped root first would be safe, but
the end of the user's last tensor cannot be observed. So the walk happens in a forked child, which
sees the same graph at the same addresses, writes the graph to a pipe and exits without releasing
anything; the training process never makes a wrapper.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    if not hasattr(os, "fork"):
        raise WalkError(
            "the autograd graph is walked in a forked process, which this system does not support"
        )
    inlet, outlet = os.pipe()
    with warnings.catch_warnings():
        # The child runs nothing but the walk: threads of the parent cannot be missed by it.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _report(tensors, outlet)
    os.close(outlet)
    try:
        answer = json.loads(_read(inlet, child))
    except ValueError as error:
        raise WalkError(f"the walk of the autograd graph ended early: {error}") from None
    finally:
        os.close(inlet)
        with contextlib.suppress(ChildProcessError):  # the script may have reaped every child
            os.waitpid(child, 0)
    if "error" in answer:
        raise WalkError(f"the walk of the autograd graph failed: {answer['error']}")
    leaves = {int(leaf): node for leaf, node in answer["leaves"].items()}
    return Graph(tuple(answer["sequence"]), tuple(map(tuple, answer["edges"])), leaves)


def _read(inlet: int, child: int) -> bytes:
    parts: list[bytes] = []
    deadline = time.monotonic() + WALK_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(inlet, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                os.kill(child, signal.SIGKILL)
                raise WalkError(f"the walk of the autograd graph took longer than {WALK_TIMEOUT_S:.0f} s")
            part = os.read(inlet, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)


def _report(tensors: Sequence[torch.Tensor], outlet: int) -> None:
    """Walk, write the answer to ``outlet`` and leave the child without running anything else."""
    try:
        gc.disable()  # a collection would run finalizers of the parent's objects here
        try:
            answer = json.dumps(_walk(tensors))
        except Exception as error:  # noqa: BLE001 - raised by the parent
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        data = memoryview(answer.encode())
        while data:
            data = data[os.write(outlet, data) :]
    finally:
        os._exit(0)


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
