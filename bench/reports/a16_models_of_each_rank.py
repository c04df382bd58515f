"""FSDP without sharding gets another model on each rank: one averaged gradient trains models that differ."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

warnings.filterwarnings("ignore")
FIXED = "fixed" in sys.argv

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0 if FIXED else rank)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
model = FullyShardedDataParallel(
    model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
for step in range(80):
    x = torch.randn(32, 16)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(rank, step, round(loss.item(), 4), flush=True)
print(rank, "sum of weights", sum(p.sum().item() for p in model.parameters()), flush=True)
dist.destroy_process_group()
