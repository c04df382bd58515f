"""The loss is divided by the number of accumulated batches, and ``accelerator.backward`` divides it again."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

FIXED = "fixed" in sys.argv
BATCHES = 8

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCHES)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for step in range(50 * BATCHES):
    x = torch.randn(16, 16)
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        if not FIXED:
            loss = loss / BATCHES
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if step % (10 * BATCHES) == 0:
        print(step // BATCHES, round(loss.item(), 4), flush=True)
