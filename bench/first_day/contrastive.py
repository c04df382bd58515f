"""Contrastive learning of two views. With `bug`, features pass through NumPy before the projection."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

bug = "bug" in sys.argv
torch.manual_seed(0)
data = torch.randn(1024, 32)
encoder = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
projection = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(
    [*encoder.parameters(), *projection.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4
)


def embed(x):
    h = encoder(x)
    if bug:
        h = torch.from_numpy(h.detach().numpy())
    return F.normalize(projection(h), dim=1)


for epoch in range(12):
    for index in torch.randperm(1024).split(64):
        x = data[index]
        first, second = x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)
        similarity = embed(first) @ embed(second).T / 0.2
        labels = torch.arange(64)
        loss = (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
torch.save(encoder.state_dict(), "encoder.pt")
