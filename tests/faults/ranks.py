"""Training script on several ranks over gloo with faults injected in one of them; run by the fault suite.

    torchrun --nproc-per-node 3 -m backlight run ranks.py SECONDS FAULT [FAULT ...]

A fault is ``KIND:RANK``. Those that end after SECONDS may be followed by others; the rest end the run.
``KIND:all`` is a control: every rank does the same; ``KIND:none`` is one where nothing happens.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from injection import wait_for_watchdog
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(0)

SECONDS = float(sys.argv[1])
FAULTS = [fault.split(":") for fault in sys.argv[2:]]


class Faulty(torch.autograd.Function):
    """Passes the gradient on, after its fault."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: str) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.fault == "backward":
            time.sleep(SECONDS)  # at: backward
        if ctx.fault == "spin":
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:  # at: spin
                pass
        return grad, None


class Net(nn.Module):
    """Two layers with a fault between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, fault: str) -> torch.Tensor:
        hidden = Faulty.apply(self.first(x), fault)
        if fault == "forward":
            time.sleep(SECONDS)  # at: ddp_forward
        return hidden if fault == "branch" else self.second(hidden)


def fault_of(step: int, rank: int) -> str:
    index, offset = divmod(step, 2)
    if offset != 1 or index >= len(FAULTS):
        return ""
    kind, at = FAULTS[index]
    return kind if at in {"all", str(rank)} else ""


class Killing(Dataset[torch.Tensor]):
    """A data set whose worker is killed at the first item."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1)


def fill_memory() -> None:
    """Ask for more than the process may have: the process has its own limit."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    torch.ones(1 << 30)  # at: oom


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1]) if world > 1 else None
    ddp = any(kind.startswith("ddp_") for kind, _ in FAULTS)
    model: Any = Net()
    if ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = torch.ones(16)
    wait_for_watchdog()
    for step in range(2 * len(FAULTS) + 2):
        fault = fault_of(step, rank)
        if fault == "between":
            time.sleep(SECONDS)  # at: between
        if fault == "evaluation":
            with torch.no_grad():
                (model.module if ddp else model)(torch.ones(2, 8), "")
                time.sleep(SECONDS)
        if fault == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "kill":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("injected")  # at: raise
        if fault == "oom":
            fill_memory()
        if fault == "worker":
            next(iter(DataLoader(Killing(), num_workers=1)))  # at: worker
        if fault == "straggler":
            for _ in range(20):
                model(torch.ones(2, 8), "")
                time.sleep(SECONDS / 20)
        if fault == "fewer":
            break
        if fault == "ends":
            return
        if fault == "barrier":
            dist.barrier()
        if fault == "subgroup" and rank in {0, 1}:
            dist.all_reduce(total, group=pair)
        loss = model(torch.ones(2, 8), fault.removeprefix("ddp_")).square().mean()
        optimizer.zero_grad()
        if fault != "ddp_skip":
            loss.backward()
        if not ddp:
            if fault == "broadcast":
                dist.broadcast(total, src=0 if FAULTS[0][1] == "all" else rank)
            elif fault == "shape":
                dist.all_reduce(torch.ones(1 << 20))
            elif fault == "dtype":
                dist.all_reduce(total.int())
            elif fault != "skip":
                dist.all_reduce(total)
            if fault == "reorder":
                dist.barrier()
            if fault == "add":
                dist.all_reduce(total)
            dist.all_gather([torch.ones(4) for _ in range(world)], torch.ones(4))
        optimizer.step()
        if fault:
            print("after", fault, rank, step, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
