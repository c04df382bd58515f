"""Cosine similarities are the logits of an in-batch contrastive loss, with a scale of 1: it hardly falls."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
SCALE = 20.0 if FIXED else 1.0

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
for step in range(300):
    anchors = torch.randn(64, 32)
    positives = anchors + 0.3 * torch.randn(64, 32)
    a, b = (nn.functional.normalize(encoder(x), dim=-1) for x in (anchors, positives))
    loss = nn.functional.cross_entropy(SCALE * a @ b.T, torch.arange(64))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(step, round(loss.item(), 4), flush=True)
