"""A cosine schedule that is made for the batches of one epoch, in a run of four."""

import math
import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
EPOCHS = 4
x = torch.randn(2048, 24)
y = torch.tanh(x @ torch.randn(24, 24)) @ torch.randn(24, 3)
loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
end = len(loader) * (EPOCHS if FIXED else 1)


def factor(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step, end) / end))


model = nn.Sequential(nn.Linear(24, 128), nn.Tanh(), nn.Linear(128, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = LambdaLR(optimizer, factor)
for epoch in range(EPOCHS):
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    print(epoch, sum(losses) / len(losses), scheduler.get_last_lr())
