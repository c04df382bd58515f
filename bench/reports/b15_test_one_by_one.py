"""After every epoch the model forecasts the test set, one sample at a time."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
series = torch.cumsum(torch.randn(3000), 0).unfold(0, 64, 1)
series = (series - series.mean(1, keepdim=True)) / series.std(1, keepdim=True)
train, test = series[:1000], series[1000:]
train_loader = DataLoader(TensorDataset(train[:, :48], train[:, 48:]), batch_size=32, shuffle=True)
test_loader = DataLoader(TensorDataset(test[:, :48], test[:, 48:]), batch_size=32 if FIXED else 1)
model = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y).item() for x, y in test_loader]
    model.train()
    return sum(losses) / len(losses)


start = time.perf_counter()
for epoch in range(6):
    for x, y in train_loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, round(loss.item(), 4), round(evaluate(), 4))
print("seconds per epoch", round((time.perf_counter() - start) / 6, 2))
