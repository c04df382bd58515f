"""A loop in the style of torchtitan on several ranks over gloo; run by torchrun from the tests.

torchrun --nproc-per-node N titan_loop.py FOLDER fsdp|tp|both plain|watched

Sharding is torch's own (FSDP2, tensor parallelism); the container of optimizers, the schedulers and the
clipping are torchtitan's. Its own models need a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.distributed.utils import clip_grad_norm_

from backlight.integrations.torchtitan import watch

torch.set_num_threads(1)


class Block(nn.Module):
    """A residual block with two weights to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.relu(self.w1(x)))


def sharded(mode: str) -> tuple[nn.Module, int]:
    """Return the model, and the data-parallel rank of this process."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    world = dist.get_world_size()
    tensor = {"fsdp": 1, "tp": world, "both": 2}[mode]
    mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("dp", "tp"))
    if tensor > 1:
        for block in (model[0], model[1]):
            parallelize_module(block, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        parallelize_module(model, mesh["tp"], {"2": ColwiseParallel(output_layouts=Replicate())})
    if mode != "tp":
        for part in (*model, model):
            fully_shard(part, mesh=mesh["dp"])
    return model, mesh["dp"].get_local_rank()


if __name__ == "__main__":
    out, mode, variant = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo")
    model, reader = sharded(mode)
    config = default_adamw(lr=1e-2)
    config.implementation = "for-loop"
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers.optimizers]
    norms = []
    run = out / f"{mode}-run"
    context = watch([model], optimizers, run=run) if variant == "watched" else contextlib.nullcontext()
    with context:
        for step in range(5):
            optimizers.zero_grad()
            for micro in range(2):
                drawn = torch.Generator().manual_seed(100 * step + 10 * micro + reader)
                x = torch.randn(8, 16, generator=drawn)
                (nn.functional.mse_loss(model(x), x[:, :4]) / 2).backward()
            norms.append(float(clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)))
            optimizers.step()
            for schedule in schedules:
                schedule.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.to_local().detach().numpy().tobytes())  # type: ignore[attr-defined]
    result = {"norms": norms, "digest": digest.hexdigest()}
    (out / f"{mode}-{variant}-{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
