"""A small DDP training script for launched jobs: ``training.py STEPS [KEYWORD...]``.

``idle``: no process group at all. ``early``: it is destroyed before the last step. ``hang FILE``: the first
start stays after its steps, until it is ended, and says so by making FILE.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)
STEPS, WORDS = int(sys.argv[1]), sys.argv[2:]
RANK = int(os.environ["RANK"])

model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
if "idle" not in WORDS:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    if "early" in WORDS and step == STEPS - 1:
        dist.barrier()
        dist.destroy_process_group()
        model = model.module
    torch.manual_seed(100 * step + RANK)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
if "hang" in WORDS:
    mark = Path(WORDS[-1])
    dist.barrier()
    if not mark.exists():
        time.sleep(1.5)  # let the writer flush
        if RANK == 0:
            mark.touch()
        time.sleep(600)
if dist.is_initialized():
    dist.destroy_process_group()
