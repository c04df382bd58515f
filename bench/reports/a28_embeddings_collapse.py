"""A cosine loss on pairs that are nearly all positive: every text gets the same embedding."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
for step in range(300):
    first = torch.randn(64, 32)
    second = first + 0.5 * torch.randn(64, 32)
    labels = torch.ones(64)
    if FIXED:
        second[32:] = torch.randn(32, 32)
        labels[32:] = 0
    loss = nn.functional.mse_loss(nn.functional.cosine_similarity(encoder(first), encoder(second)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        with torch.no_grad():
            others = nn.functional.cosine_similarity(encoder(first), encoder(first.roll(1, 0))).mean()
        print(step, round(loss.item(), 4), "cosine of different texts", round(others.item(), 3), flush=True)
