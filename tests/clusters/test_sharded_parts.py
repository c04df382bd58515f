"""A sharded model with a missing rank: parameters with a missing shard are unmeasured."""

from __future__ import annotations

from pathlib import Path

import pytest

import backlight
from ranks.launching import launched

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import backlight
torch.set_num_threads(1); torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 1, bias=False))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for step in range(3):
        optimizer.zero_grad(); model(torch.ones(2, 6)).sum().backward(); optimizer.step()
if os.environ["RANK"] == "1":
    train()
else:
    with backlight.watch(model, optimizer, run=os.environ["OUT"], every=1, monitors=("health",)):
        train()
dist.barrier(); dist.destroy_process_group()
"""


@pytest.mark.full
def test_missing_shard_is_unmeasured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, output = launched(3, script, OUT=str(tmp_path / "run"))
    assert code == 0, output
    run = backlight.open_run(tmp_path / "run")
    assert run.losses == ("attempt 0: rank 1 of 3 left no file",)
    assert run.attempts[0].ranks == (0, 2)
    frame = run.frame("gradient", "norm")
    assert frame.steps.tolist() == [0, 1, 2]
    # The first lacks two of six rows; the second has one row, which rank 0 holds.
    assert dict(zip(frame.names, frame.measured.all(axis=0).tolist(), strict=True)) == {
        "0.weight": False,
        "1.weight": True,
    }
    assert not frame.measured[:, 0].any()
    alone = run.frame("gradient", "norm", rank=0)
    assert alone.measured.all()
