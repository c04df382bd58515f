"""A small classifier with auxiliary features. With --plant, three parameters silently stop learning.

    backlight why-no-grad examples/cut_gradient.py --plant
    backlight why-no-grad examples/cut_gradient.py

Nothing fails and the loss goes down in both: only some of the parameters are not trained.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Mixes two views of the input, one of them through a histogram of its own."""

    def __init__(self, injected: bool) -> None:
        super().__init__()
        self.injected = injected
        self.encoder = nn.Linear(16, 32)
        self.centres = nn.Parameter(torch.linspace(-1, 1, 8))
        self.view = nn.Linear(8, 32)
        self.head = nn.Linear(32, 4)

    def histogram(self, x: Tensor) -> Tensor:
        """Return how much of the input lies near each centre."""
        distance = x[..., None] - self.centres
        if self.injected:
            return (distance.abs() < 0.5).sum(dim=1).float() / x.shape[1]
        return torch.exp(-4 * distance.square()).mean(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of 4 classes."""
        hidden = torch.relu(self.encoder(x))
        if self.injected:
            hidden = torch.from_numpy(hidden.detach().numpy())
        return self.head(hidden + self.view(self.histogram(x)))


def main() -> None:
    """Train for a few steps on made-up data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", action="store_true", help="cut the gradient of three parameters")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier(options.plant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(options.steps):
        x = torch.randn(64, 16)
        loss = F.cross_entropy(model(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
