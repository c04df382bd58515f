"""FSDP2 on two ranks; started by torchrun with a folder for what a rank gathers and what is written of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import backlight
from backlight.watchdog import runtime_dir
from backlight.watchdog.shared_state import read_state

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[1], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with backlight.watch(model, optimizer, run=folder / "run", monitors=("stalls",)):
    for _ in range(3):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [state for d in runtime_dir.runtime_directories() for state in d.glob(f"*{rank:05d}.state")]
    (directory,) = [s.parent for s in states if (state := read_state(s)) and state.pid == os.getpid()]
    written = json.loads(runtime_dir.document_path(directory, rank, "buckets").read_text())
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
    gathered = [
        e["input_sizes"][0][0]
        for e in entries
        if "gather" in e["profiling_name"] and e["input_dtypes"] == ["Float"]
    ]
found = {"gathered": gathered, "rows": written["shard_rows"], "numels": written["shard_numels"]}
(folder / f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
