"""Updates that a script makes without an optimizer: weights that differ from those of the last backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch

MAX_NODES = 1_000_000
"""Nodes of a graph that are visited for its leaves."""

TENSORS = 8
"""Parameters that are followed."""

VALUES = 16
"""Values of each that are compared, where that takes no wait for a device: `.data` leaves no trace."""


class UpdatesByHand:
    """Compares a sample of the parameters with what they were when the last backward ended."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[torch.Tensor], int, list[float]]] = []

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember the parameters that have a gradient now."""
        with_gradient = [p for p in parameters if p.grad is not None]
        spread = with_gradient[:: -(-len(with_gradient) // TENSORS) or 1]
        self._noted = [(weakref.ref(p), p._version, _values(p)) for p in spread]

    def forget(self) -> None:
        """Begin anew."""
        self._noted = []

    def is_made(self) -> bool:
        """Return whether one has changed."""
        return any(
            (now := noted()) is not None and (now._version != version or _values(now) != values)
            for noted, version, values in self._noted
        )


def leaves_below(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a backward from ``roots`` gives gradients, those nearest to a root first."""
    pending = deque([root.grad_fn for root in roots if root.grad_fn is not None])
    seen, leaves = set(pending), []
    while pending and len(seen) < MAX_NODES:
        node = pending.popleft()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        below = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(below)
        pending.extend(dict.fromkeys(below))
    return leaves


def _values(parameter: torch.Tensor) -> list[float]:
    if type(parameter) not in {torch.Tensor, torch.nn.Parameter} or not parameter.is_cpu:
        return []
    flat: list[float] = parameter.detach().reshape(-1)[:VALUES].tolist()
    return flat
