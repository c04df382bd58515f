"""Ray Train with backlight: two workers under DDP. With --plant, worker 1 waits for data that never come.

python examples/with_ray.py --storage runs/ray
python examples/with_ray.py --storage runs/ray-hang --plant

The callback of the driver gives both workers one run directory, and prints what their watchdogs diagnose.
With --plant the job fails with that diagnosis, not 30 minutes later by the timeout of the process group.
"""

from __future__ import annotations

import argparse
import queue
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional as F

import backlight
from backlight.integrations.ray import BacklightCallback


def train(config: dict[str, Any]) -> None:
    """Train on noise, in each worker."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    with backlight.watch(model, optimizer, stalls={"after": config["stall"]}, trackers="ray"):
        for step in range(config["steps"]):
            if config["plant"] and rank == 1 and step == 20:
                queue.Queue[torch.Tensor]().get()  # the accident: nothing fills this queue
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


def main() -> None:
    """Fit, and print how that ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stall", type=float, default=None, help="stall timeout in seconds")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"))
    parser.add_argument("--plant", action="store_true", help="let worker 1 wait at step 20")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "plant": options.plant, "stall": options.stall},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="first",
            storage_path=str(options.storage.absolute()),
            callbacks=[BacklightCallback(fail_after=5.0)],
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"recorded in {options.storage}/first/backlight")


if __name__ == "__main__":
    main()
