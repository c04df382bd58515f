"""A training whose custom backward takes a lock. With --plant, another thread holds it and never lets go.

    backlight run examples/deadlock.py
    backlight run --stall 2 examples/deadlock.py --plant

Without --plant it trains and ends. With it, the second step hangs in backward: the program is not slow,
nothing is wrong with the gradients, and no error is ever raised.
"""

from __future__ import annotations

import argparse
import threading

import torch
from torch import nn

STATISTICS = threading.Lock()
CLIPPED = [0]


class Clip(torch.autograd.Function):
    """Pass the input through; in backward, clip the gradient and count under a lock how often."""

    @staticmethod
    def forward(ctx, x):
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Clip, and count what was clipped."""
        with STATISTICS:
            CLIPPED[0] += int((grad.abs() > 1).sum())
        return grad.clamp(-1, 1)


class Block(nn.Module):
    """A residual block whose gradient is clipped on its way back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with the block's part added."""
        return x + self.outer(torch.relu(Clip.apply(self.inner(x))))


def report(taken: threading.Event) -> None:
    """Report statistics: the fault is that it keeps the lock while it waits until they are read."""
    STATISTICS.acquire()
    taken.set()
    threading.Event().wait()


def main() -> None:
    """Train for some steps on noise."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plant", action="store_true", help="let another thread keep the lock from step 2 on"
    )
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(6)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        if options.plant and step == 1:
            taken = threading.Event()
            threading.Thread(target=report, args=(taken,), name="reporter", daemon=True).start()
            taken.wait()
        optimizer.zero_grad()
        loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1} of {options.steps}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
