"""A one-cycle schedule made for every batch is advanced once per epoch."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=96)

# SETUP
for step in range(96):
    rows = torch.randint(0, len(x), (32,))
    inputs, targets = x[rows], y[rows]
    # STEP
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 16 == 15:  # BUG
        schedule.step()  # BUG
    # CONTROL: schedule.step()
    # STEPPED
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
# END
