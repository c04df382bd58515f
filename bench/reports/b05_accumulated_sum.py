"""Gradients of eight small batches are added up before every step."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
ACCUMULATED = 8
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
rule = torch.randn(20, 5)

for batch in range(1600):
    x = torch.randn(8, 20)
    loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
    (loss / ACCUMULATED if FIXED else loss).backward()
    if (batch + 1) % ACCUMULATED == 0:
        optimizer.step()
        optimizer.zero_grad()
    if batch % 200 == 0:
        print(batch, round(loss.item(), 4))
