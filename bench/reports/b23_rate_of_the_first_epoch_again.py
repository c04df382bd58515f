"""A run that goes on: creating its schedule sets the rate of the loaded optimizer back to the first one."""

import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
EPOCHS, BATCHES, STOP = 12, 25, 9
x = torch.randn(800, 16)
y = (x @ torch.randn(16, 4) + torch.randn(800, 4)).argmax(1)


def factor(epoch: int) -> float:
    return 0.5 * (1 + math.cos(epoch * math.pi / EPOCHS)) * 0.9 + 0.1


def train(directory: str, first: int, last: int) -> None:
    path = Path(directory) / "last.pt"
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = torch.load(path) if first else None
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler = LambdaLR(optimizer, factor, last_epoch=first - 1 if FIXED and first else -1)
    if FIXED and first:
        optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.last_epoch = first
    for epoch in range(first, last):
        rate = optimizer.param_groups[0]["lr"]
        for rows in torch.randperm(800).view(BATCHES, 32):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(epoch, "rate", rate, "loss", loss.item())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


with tempfile.TemporaryDirectory() as directory:
    train(directory, 0, STOP)
    train(directory, STOP, EPOCHS)
