"""A classifier in float64 with random batches and a summed loss, for comparisons with single gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(n: int) -> Batch:
    return torch.randn(n, 5, dtype=torch.float64), torch.randint(0, 3, (n,))


def summed(model: nn.Module, given: Batch) -> Tensor:
    return functional.cross_entropy(model(given[0]), given[1], reduction="sum")
