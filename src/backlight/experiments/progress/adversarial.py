"""Accuracy under attack (Humayun et al., 2402.15555): projected gradient steps within an l∞ ball."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def attacked(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    radius: float,
    steps: int,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Return ``inputs`` moved against ``model`` within ``radius`` in l∞ and within [low, high].

    Projected gradient ascent of the cross-entropy (Madry et al., 1706.06083) from the inputs themselves,
    without a random start, in steps of 2.5·radius/steps. Gradients are taken with respect to inputs
    alone: no ``.grad`` is written.
    """
    origin, moved = inputs.detach(), inputs.detach().clone()
    size = 2.5 * radius / steps
    with torch.enable_grad():
        for _ in range(steps):
            moved.requires_grad_(True)
            loss = nn.functional.cross_entropy(model(moved), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, moved)
            step = moved.detach() + size * gradient.sign()
            moved = torch.clamp(torch.clamp(step, origin - radius, origin + radius), low, high)
    return moved.detach()


def adversarial_accuracy(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, radius: float, steps: int
) -> float:
    """Return the share of samples still right after :func:`attacked`."""
    moved = attacked(model, inputs, labels, radius=radius, steps=steps)
    with torch.no_grad():
        return float((model(moved).argmax(1) == labels).double().mean())
