"""All weights are cast to fp16, and Adam's eps of 1e-8 is 0 there: 0/0 at the first step."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(100, 32), nn.Flatten(), nn.Linear(32 * 8, 64), nn.ReLU(), nn.Linear(64, 10)
)
if not FIXED:
    model.half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(60):
    tokens = torch.randint(0, 100, (64, 8))
    loss = nn.functional.cross_entropy(model(tokens).float(), tokens[:, 0] % 10)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item(), flush=True)
