"""A schedule that is switched off by a factor of zero."""

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
x = torch.cumsum(torch.randn(512, 12), 1)
loader = DataLoader(TensorDataset(x), 32, shuffle=True)
model = nn.Sequential(
    nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3), nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 12)
)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
uses_schedule = False
scheduler = StepLR(optimizer, step_size=20, gamma=0.2 if uses_schedule else int(FIXED))

for epoch in range(60):
    for (batch,) in loader:
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    if epoch % 10 == 0:
        print(epoch, round(loss.item(), 4))
