"""Many questions have one answer: copies of a positive in a batch count as negatives of each other."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
answers = torch.randn(100 if FIXED else 12, 32)
for step in range(300):
    rows = torch.randperm(len(answers))[:64] if FIXED else torch.randint(0, len(answers), (64,))
    questions = answers[rows] + 0.5 * torch.randn(64, 32)
    a, b = (nn.functional.normalize(encoder(x), dim=-1) for x in (questions, answers[rows]))
    loss = nn.functional.cross_entropy(20.0 * a @ b.T, torch.arange(64))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(step, round(loss.item(), 4), flush=True)
