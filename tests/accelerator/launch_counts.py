"""Kernels that a step launches on the simulated accelerator, for a model with the tensors of GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import simulated
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight

MOST_LAUNCHES = 40
"""Launches that watching may add to a step."""


def launches(work: Callable[[], Any]) -> int:
    """Return how many kernels this thread launches."""
    before = simulated.counts(simulated.KERNEL).get("MainThread", 0)
    work()
    return simulated.counts(simulated.KERNEL).get("MainThread", 0) - before


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first_norm(x)).chunk(3, -1)
        x = x + self.projection((q @ k.mT).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Gpt(nn.Module):
    """A model with the 148 tensors of GPT-2."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(12)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def gpt_steps(steps: int = 9, **settings: Any) -> tuple[list[int], list[Tensor]]:
    torch.manual_seed(0)
    model = Gpt().to("sim")
    assert len(list(model.parameters())) == 148
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(50, (2, 8)).to("sim")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    watch = backlight.watch(model, optimizer, quiet=True, summary=False, **settings) if settings else None
    counts = [launches(step)]
    with watch or nullcontext():
        for _ in range(steps):
            with simulated.no_synchronization():
                counts.append(launches(step))
    return counts[1:], [p.detach().cpu() for p in model.parameters()]
