"""Two ranks reduce every loss for the log, and one of them has an image without masks, so one loss fewer."""

import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "fixed" in sys.argv

signal.alarm(90)  # what never ends is ended
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
for step in range(60):
    x = torch.randn(8, 16)
    masks = torch.ones(8, dtype=torch.bool)
    if step == 3 and rank == 1:
        masks[:] = False
    scores = model(x)
    losses = {"boxes": nn.functional.smooth_l1_loss(scores[:, :4], x[:, :4])}
    if masks.any():
        losses["masks"] = nn.functional.mse_loss(scores[masks, 4], x[masks, 5])
    elif FIXED:
        losses["masks"] = 0 * scores[:, 4].sum()
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
    for loss in losses.values():
        dist.all_reduce(loss.detach().div_(dist.get_world_size()))
    if rank == 0 and step % 10 == 0:
        print(step, losses["boxes"].item(), flush=True)
dist.destroy_process_group()
