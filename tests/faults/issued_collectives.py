"""Collectives that are issued at one place and waited for at another, on three ranks; run by the fault suite.

    torchrun --nproc-per-node 3 -m backlight run issued_collectives.py SECONDS FAULT [FAULT ...]

A fault is ``KIND:RANK``, as in ``ranks.py``; those that are late end after SECONDS.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from injection import wait_for_watchdog
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)

SECONDS = float(sys.argv[1])
FAULTS = [fault.split(":") for fault in sys.argv[2:]]


class Late(nn.Module):
    """Passes its input on, late where that is the fault."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)  # at: late
        return x


def fault_of(step: int, rank: int) -> str:
    index, offset = divmod(step, 2)
    if offset != 1 or index >= len(FAULTS):
        return ""
    kind, at = FAULTS[index]
    return kind if at in {"all", str(rank)} else ""


def reduce_later(fault: str, world: int, one: Any, other: Any) -> None:
    """Issue a reduction, work on, and wait for it."""
    x = torch.ones(32 if fault == "async_size" else 16)
    if fault == "async_late":
        time.sleep(SECONDS)  # at: async_late
    handle = None if fault == "async_skip" else dist.all_reduce(x, group=one, async_op=True)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:  # the host is elsewhere when the collective hangs
        pass
    if fault == "async_skip":
        dist.barrier()
    if handle is not None:
        handle.wait()  # at: wait
    first, second = (other, one) if fault == "order" else (one, other)
    dist.all_reduce(x, group=first)
    dist.all_reduce(x, group=second)
    if any(kind == "async_skip" and at == "all" for kind, at in FAULTS):
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    one, other = dist.new_group(group_desc="one"), dist.new_group(group_desc="other")
    late = Late()
    model: Any = nn.Sequential(nn.Linear(8, 8), late, nn.Linear(8, 8))
    if any(kind.startswith("ddp_") for kind, _ in FAULTS):
        model = DistributedDataParallel(model)
    elif any(kind.startswith("fsdp_") for kind, _ in FAULTS):
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    handles: list[Any] = []
    if any(kind == "hook_late" for kind, _ in FAULTS):  # what DDP does, issued by the script itself
        model[2].bias.register_post_accumulate_grad_hook(
            lambda bias: handles.append(dist.all_reduce(bias.grad, async_op=True))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wait_for_watchdog()
    for step in range(2 * len(FAULTS) + 2):
        fault = fault_of(step, rank)
        late.seconds = SECONDS if fault.endswith("_late") and not fault.startswith("async") else 0.0
        if fault != "fsdp_skip":
            model(torch.ones(2, 8)).square().mean().backward()
        while handles:
            handles.pop().wait()
        reduce_later(fault, world, one, other)
        optimizer.step()
        optimizer.zero_grad()
        if fault:
            print("after", fault, rank, step, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
