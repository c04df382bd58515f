"""A sound loop of steps of tens of milliseconds, for the added time."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 512)
y = (x @ torch.randn(512, 10)).argmax(1)
layers = []
for _ in range(6):
    layers += [nn.Linear(512, 512), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()

# SETUP
for step in range(120):
    rows = torch.randint(0, len(x), (256,))
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
