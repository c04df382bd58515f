"""One function runs both phases, and its step does not ask which."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
rule = torch.randn(20, 4)


def dataset(count: int) -> TensorDataset:
    x = torch.randn(count, 20)
    return TensorDataset(x, (x @ rule + 2 * torch.randn(count, 4)).argmax(1))


loaders = {
    "train": DataLoader(dataset(1024), 32, shuffle=True),
    "validation": DataLoader(dataset(512), 32),
}
model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def run(phase: str, x: torch.Tensor, y: torch.Tensor) -> float:
    model.train(not FIXED or phase == "train")
    loss = nn.functional.cross_entropy(model(x), y)
    if not FIXED or phase == "train":
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


for epoch in range(8):
    for phase, loader in loaders.items():
        losses = [run(phase, x, y) for x, y in loader]
        print(epoch, phase, round(sum(losses) / len(losses), 4))
