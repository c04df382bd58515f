"""Gradients of eight batches are added, and not divided by their number."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
loss_fn = nn.CrossEntropyLoss()
accumulation_steps = 8

# SETUP
for step in range(320):
    rows = torch.randint(0, len(x), (32,))
    inputs, targets = x[rows], y[rows]
    # STEP
    loss = loss_fn(model(inputs), targets)
    loss.backward()  # BUG
    # CONTROL: (loss / accumulation_steps).backward()
    if (step + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
        # STEPPED
    if step % 80 == 0:
        print(step, round(loss.item(), 4))
# END
