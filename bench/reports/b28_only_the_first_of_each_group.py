"""A triplet loss over groups of sentences uses the first of each group, so no pair of one class is left."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
MARGIN, CLASSES, EACH = 5.0, 8, 4
embed = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(embed.parameters(), lr=1e-3)
centres = torch.randn(CLASSES, 24)


def hardest(labels: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return the triplet loss of the farthest of its class and the nearest of the others."""
    distances = (vectors[:, None] - vectors[None]).pow(2).sum(-1).clamp(min=1e-12).sqrt()
    same = labels[:, None] == labels[None]
    positive = (distances * same).max(1).values
    negative = (distances + 1e3 * same).min(1).values
    return (positive - negative + MARGIN).relu().mean()


for step in range(250):
    groups = centres[:, None] + 2.0 * torch.randn(CLASSES, EACH, 24)
    sentences = [embed(groups[:, member]) for member in range(EACH)]
    labels = torch.arange(CLASSES)
    loss = hardest(labels.repeat(EACH), torch.cat(sentences)) if FIXED else hardest(labels, sentences[0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, loss.item())
