"""Optimizers and schedules that several experiments share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

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


def adamw(
    model: nn.Module, training: DecoupledDecay, eps: float = 1e-8, *, decay_vectors: bool = True
) -> torch.optim.AdamW:
    """Return AdamW on all parameters of ``model``.

    Without ``decay_vectors`` those of one dimension, biases and gains of a norm, do not decay: a second
    group of the optimizer holds them.
    """
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not decay_vectors:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups,
        lr=training.lr,
        weight_decay=training.weight_decay,
        betas=(training.betas[0], training.betas[1]),
        eps=eps,
    )


def clip_gradients(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Scale the gradients to a common norm of at most ``norm`` as each step of ``optimizer`` begins.

    0 leaves them as they are. What a run records is the gradient as backward left it, before the scaling.

    Raises
    ------
    ValueError
        If ``norm`` is negative or not finite.
    """
    if not (math.isfinite(norm) and norm >= 0):
        raise ValueError(f"training.clip is {norm!r}, expected a norm above 0, or 0 for no clipping")
    held = list(parameters)

    def clip(_optimizer: torch.optim.Optimizer, _args: Any, _keywords: Any) -> None:
        nn.utils.clip_grad_norm_(held, norm)

    if norm:
        optimizer.register_step_pre_hook(clip)


def linear_warmup(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return a rate that rises over ``steps`` updates and then stays; None for no steps."""
    if steps < 1:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min((done + 1) / steps, 1.0))
