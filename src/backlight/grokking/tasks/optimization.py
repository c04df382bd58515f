"""Optimizers and schedules that several experiments share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class DecoupledDecay(Protocol):
    """The part of a training section that AdamW needs."""

    @property
    def lr(self) -> float:
        """Return the learning rate."""

    @property
    def weight_decay(self) -> float:
        """Return the decoupled weight decay."""

    @property
    def betas(self) -> tuple[float, float]:
        """Return both rates of the moments."""


def adamw(model: nn.Module, training: DecoupledDecay, eps: float = 1e-8) -> torch.optim.AdamW:
    """Return AdamW on all parameters of ``model``."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=training.lr,
        weight_decay=training.weight_decay,
        betas=(training.betas[0], training.betas[1]),
        eps=eps,
    )


def linear_warmup(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return a rate that rises over ``steps`` updates and then stays; None for no steps."""
    if steps < 1:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min((done + 1) / steps, 1.0))
