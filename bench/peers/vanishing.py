"""Sixteen sigmoid layers: the gradient vanishes before it reaches the first."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
layers = [nn.Linear(20, 32)]
for _ in range(16):
    layers += [nn.Sigmoid(), nn.Linear(32, 32)]  # BUG
    # CONTROL: layers += [nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 32)]
model = nn.Sequential(*layers, nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()

# SETUP
for step in range(80):
    rows = torch.randint(0, len(x), (32,))
    inputs, targets = x[rows], y[rows]
    # STEP
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    # STEPPED
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
# END
