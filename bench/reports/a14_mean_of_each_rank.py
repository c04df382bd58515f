"""FSDP averages the gradients of each rank's mean: tokens of a rank with few of them count more."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FIXED = "fixed" in sys.argv

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 50))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
for step in range(80):
    tokens = torch.randint(0, 50, (16, 12))
    labels = (tokens * 3 + 1) % 50
    prompts = torch.randint(1, 4, (16, 1)) if rank == 0 else torch.randint(9, 12, (16, 1))
    labels[torch.arange(12) < prompts] = -100
    scores = model(tokens).flatten(0, 1)
    if FIXED:
        count = (labels != -100).sum()
        dist.all_reduce(count)
        loss = nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum") * size / count
    else:
        loss = nn.functional.cross_entropy(scores, labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(rank, step, round(loss.item(), 4), flush=True)
dist.destroy_process_group()
