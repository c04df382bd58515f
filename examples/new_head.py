"""Fine-tune a small network on a new task, with a mistake that the loss does not show.

The head is exchanged for one with more classes after the optimizer was built: the optimizer goes on
updating the old head, the new one keeps its random weights, and the loss still falls, because the body
adapts to them. ``--fixed`` builds the optimizer after the exchange.

    backlight run examples/new_head.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def spirals(count: int, arms: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points of ``arms`` interleaved spirals with their arm as the class."""
    target = torch.randint(0, arms, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4.0 * radius + 2 * torch.pi * target / arms + 0.1 * torch.randn(count, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1), target


class Classifier(nn.Module):
    """A body of three layers and a linear head."""

    def __init__(self, classes: int, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def main() -> None:
    """Train on three spirals, exchange the head, train on five."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fixed", action="store_true", help="build the optimizer after the exchange")
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Classifier(classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head = nn.Linear(128, 5)
    if options.fixed:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        x, target = spirals(256, 5, generator)
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
