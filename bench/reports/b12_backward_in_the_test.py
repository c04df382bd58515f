"""The function that computes a loss also propagates that of the test set."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
rule = torch.randn(16, 4)


def dataset(count: int) -> TensorDataset:
    x = torch.randn(count, 16)
    return TensorDataset(x, (x @ rule + torch.randn(count, 4)).argmax(1))


train_loader = DataLoader(dataset(512), 32, shuffle=True)
test_loader = DataLoader(dataset(512), 32)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
adam = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_of(x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> float:
    loss = nn.functional.cross_entropy(model(x), y)
    if not FIXED or optimizer is not None:
        loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


for epoch in range(12):
    model.train()
    losses = [loss_of(x, y, adam) for x, y in train_loader]
    model.eval()
    tests = [loss_of(x, y, None) for x, y in test_loader]
    print(epoch, round(sum(losses) / len(losses), 4), round(sum(tests) / len(tests), 4))
