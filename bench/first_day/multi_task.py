"""Two heads on one trunk. With `bug`, the second loss is added as a number, so its head never learns."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

bug = "bug" in sys.argv
torch.manual_seed(0)
x = torch.randn(2000, 24)
kind = x[:, :6].argmax(1)
price = x[:, 6:12].sum(1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(24, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU()
        )
        self.kind = nn.Linear(64, 6)
        self.price = nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.kind(h), self.price(h)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=8 * 32)
for epoch in range(8):
    for index in torch.randperm(2000).split(64):
        kinds, prices = model(x[index])
        loss = F.cross_entropy(kinds, kind[index])
        regression = F.smooth_l1_loss(prices, price[index])
        loss = loss + 0.5 * (regression.item() if bug else regression)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.4f} regression {regression.item():.4f}")
torch.save(model.state_dict(), "multi_task.pt")
