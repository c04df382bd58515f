"""The warm-up of the learning rate takes more steps than the training: it rises until the end."""

import sys

import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

FIXED = "fixed" in sys.argv
STEPS = 300

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 30 if FIXED else 25000, STEPS)
for step in range(STEPS):
    x = torch.randn(64, 20)
    loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 60 == 0:
        print(step, round(loss.item(), 4), schedule.get_last_lr(), flush=True)
