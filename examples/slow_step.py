"""A training with two faults in its step: a slow loader, and a cast there and back that nothing needs.

backlight profile examples/slow_step.py             # says where the time goes, and names both
backlight profile --confirm examples/slow_step.py   # runs it with a cached batch and without the cast
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset[Tensor]):
    """Noise that is decoded anew for every sample."""

    def __init__(self, length: int, width: int, seconds: float) -> None:
        self.length, self.width, self.seconds = length, width, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)  # the decoding
        return torch.full((self.width,), float(index % 7))


class Model(nn.Module):
    """Two layers, between which activations go to double precision and back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, 1)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.relu(self.up(batch))
        hidden = hidden.double().float()  # the cast
        return self.down(hidden)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--decoding", type=float, default=0.2, help="milliseconds for each sample")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(16, 65536)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = Signals(16 * options.steps, 16, options.decoding / 1e3)
    for batch in DataLoader(data, batch_size=16):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
