"""What a total loss is made of, and the loss of each sample, from the autograd graph below it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from backlight.capture.loss_nodes import RESHAPES, Node, inputs_of, kind_of, kinds

MAX_NODES = 64
"""Nodes below a loss that are visited."""

SHOWS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether torch shows the hooks of a saved tensor. Where it does not, as torch 2.9, none is read."""

_ARITHMETIC = kinds("Add Sub Mul Div Neg Mean Sum Stack Cat Where MaskedFill Gather Pow Abs")
"""Nodes that a total loss is made of."""

CLASS_LOSSES = kinds("NllLoss NllLoss2D")
"""Nodes of the loss functions that compare log-probabilities with class indices."""


def terms(root: Node | None) -> Iterator[tuple[str, Node]]:
    """Yield kind and node of what a total loss is made of, from ``root`` down, up to the loss functions."""
    pending = [root]
    for _ in range(MAX_NODES):
        if not pending:
            return
        node = pending.pop(0)
        kind = kind_of(node)
        yield kind, node
        if kind in _ARITHMETIC or kind in RESHAPES:
            pending += inputs_of(node)


def are_plain(node: Node, *names: str) -> bool:
    """Return whether tensors that a node has saved have no hooks, which belong to the script.

    Unpacking what a hook has packed may compute a checkpointed forward again.
    """
    saved = [getattr(node, f"_raw_saved_{name}", None) for name in names]
    return SHOWS_HOOKS and all(getattr(one, "unpack_hook", one) is None for one in saved)


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
            given = node._saved_self.detach(), node._saved_target.detach()
            return functional.binary_cross_entropy_with_logits(*given, reduction="none")
    return None


@torch.no_grad()
def _of_classes(log_probabilities: Tensor, targets: Tensor, ignored: int) -> Tensor:
    valid = targets != ignored
    if log_probabilities.dim() == 1:
        log_probabilities, targets, valid = log_probabilities[None], targets[None], valid[None]
    picked = log_probabilities.detach().gather(1, targets.where(valid, 0).unsqueeze(1)).squeeze(1)
    return torch.where(valid, -picked, 0.0)
