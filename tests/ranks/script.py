"""An FSDP2 training script without backlight, for torchrun.

    torchrun --nproc-per-node K script.py FOLDER [kill]

With ``kill``, rank 1 is killed at step 3 of the first start; the restart trains from the beginning.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ranks.network import STEPS, adam, batch, build, loss_of

torch.set_num_threads(1)
FOLDER, START = Path(sys.argv[1]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
FOLDER.mkdir(parents=True, exist_ok=True)
# One store per start: in the launcher's store, ranks may find addresses of the previous start.
dist.init_process_group(
    "gloo",
    init_method=f"file://{FOLDER.resolve()}/meeting-{START}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
RANK = dist.get_rank()
kill = "kill" in sys.argv and START == "0"

model = fully_shard(build())
optimizer = adam(model)
for step in range(6 if "kill" in sys.argv else STEPS):
    tokens, target = (t.chunk(dist.get_world_size())[RANK] for t in batch(step))
    optimizer.zero_grad()
    loss_of(model(tokens), target).backward()
    optimizer.step()
    if kill and step == 3:
        time.sleep(2.5)  # longer than a flush
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
torch.save([p.to_local().detach() for p in model.parameters()], FOLDER / f"{RANK}.pt")
dist.destroy_process_group()
