"""An engine of DeepSpeed with backlight around its loop.

torchrun --nproc-per-node 2 examples/with_deepspeed.py --stage 2 --out runs/deepspeed
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from backlight.integrations.deepspeed import watch


class Regressor(nn.Module):
    """A body and a head; with ``detach`` the loss does not reach the body."""

    def __init__(self, *, detach: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64))
        self.head = nn.Linear(64, 1)
        self.detach = detach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one value per sample, ``[N, 1]`` of ``[N, 16]``."""
        hidden: torch.Tensor = self.body(x)
        prediction: torch.Tensor = self.head(hidden.detach() if self.detach else hidden)
        return prediction


def main() -> None:
    """Train with accumulation and clipping, watched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--detach", action="store_true", help="cut the body from the loss, a fault to find")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(backend, verbose=False)
    torch.manual_seed(0)
    model = Regressor(detach=options.detach)
    accumulation = 2
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    )
    drawn = torch.Generator().manual_seed(dist.get_rank())
    with watch(engine, run=options.out) as watched:
        for number in range(options.steps * accumulation):
            x = torch.randn(16, 16, generator=drawn).to(engine.device)
            loss = nn.functional.mse_loss(engine(x), x[:, :1].sin())
            engine.backward(loss)
            engine.step()
            if number % 10 == 0:
                watched.log(train_loss=loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
