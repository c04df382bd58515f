"""A detector matches objects to proposals until each has its own, also where there are more objects."""

import signal
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

signal.alarm(28)  # what never ends is ended
torch.manual_seed(0)
PROPOSALS = 12
model = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, PROPOSALS * 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def match(cost: torch.Tensor) -> torch.Tensor:
    """Return which proposal each object gets, shape [objects]."""
    cost = cost.clone()
    chosen = cost.argmin(0)
    while chosen.unique().numel() < cost.shape[1]:
        for proposal in range(PROPOSALS):
            objects = (chosen == proposal).nonzero().squeeze(1)
            if len(objects) > 1:
                best = objects[cost[proposal, objects].argmin()]
                cost[proposal, objects[objects != best]] += 1e3
        chosen = cost.argmin(0)
    return chosen


for step in range(200):
    count = int(torch.randint(1, 6, ())) if step != 8 else PROPOSALS + 2
    if FIXED:
        count = min(count, PROPOSALS)
    boxes = torch.randn(count, 4)
    image = torch.cat([boxes.mean(0).repeat(3), torch.randn(12)])
    predicted = model(image).view(PROPOSALS, 4)
    with torch.no_grad():
        chosen = match(torch.cdist(predicted, boxes))
    loss = nn.functional.l1_loss(predicted[chosen], boxes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(step, loss.item(), flush=True)
