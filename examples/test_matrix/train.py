"""A small training script with options for a test matrix: recomputation, ranks and a fault to find.

    python train.py                                  trains and exits
    python train.py --checkpoint                     recomputes each block in backward, and hangs
    python train.py --checkpoint --lock reentrant    does the same and exits

The fault is a common accident: a block counts its calls under a lock, and the recomputation takes the same
lock first, so that only one block is recomputed at a time. The inner acquisition waits for the outer one,
which waits for it.
"""

from __future__ import annotations

import argparse
import os
import threading

import torch
from torch import nn

LOCK = threading.Lock()
CALLS = [0]


class Recompute(torch.autograd.Function):
    """Run a block without keeping its activations, and run it again in backward."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        """Keep the input only."""
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        """Recompute under the lock: one block at a time, to bound the memory."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with LOCK, torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grad)


class Block(nn.Module):
    """A linear layer that counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation."""
        with LOCK:
            CALLS[0] += 1
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks in a row, recomputed in backward or not."""

    def __init__(self, depth: int, width: int, *, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block."""
        for block in self.blocks:
            x = Recompute.apply(block, x, *block.parameters()) if self.recompute else block(x)
        return x


def main() -> None:
    """Train for some steps on noise."""
    global LOCK  # noqa: PLW0603 - the option of the example
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--lock", choices=("plain", "reentrant"), default="plain")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.lock == "reentrant":
        LOCK = threading.RLock()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net: nn.Module = Net(4, 32, recompute=options.checkpoint)
    print(
        f"recomputation: {'on' if options.checkpoint else 'off'}; lock: {options.lock}; ranks: {ranks}",
        flush=True,
    )
    model = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}/{options.steps}", flush=True)
    print(f"training finished after {CALLS[0]} calls of a block", flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
