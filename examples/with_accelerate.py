"""A loop of Accelerate with backlight around it.

python examples/with_accelerate.py --out runs/accelerate
torchrun --nproc-per-node 2 examples/with_accelerate.py --out runs/accelerate
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from backlight.integrations.accelerate import watch


def main() -> None:
    """Train with accumulation and clipping, watched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(256, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=16),
    )
    with watch(accelerator, model, optimizer, run=options.out):
        for _ in range(options.epochs):
            for inputs, targets in data:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.log({"train_loss": loss.item()})
    accelerator.end_training()


if __name__ == "__main__":
    main()
