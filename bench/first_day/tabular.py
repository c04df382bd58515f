"""Regression on a table. With `bug`, the target has shape [N] and the prediction [N, 1]."""

import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

bug = "bug" in sys.argv
torch.manual_seed(0)
features = torch.randn(2000, 12)
target = features[:, :3].sum(1) + torch.sin(2 * features[:, 3]) + 0.1 * torch.randn(2000)
if not bug:
    target = target[:, None]
train = DataLoader(TensorDataset(features[:1600], target[:1600]), batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
loss_fn = nn.MSELoss()
for epoch in range(10):
    model.train()
    total = 0.0
    for x, y in train:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    model.eval()
    with torch.no_grad():
        error = (model(features[1600:]).squeeze(1) - target[1600:].flatten()).abs().mean()
    print(f"epoch {epoch} loss {total / 1600:.4f} mean absolute error {error:.4f}")
torch.save(model.state_dict(), "tabular.pt")
