"""`kl_div` gets probabilities where it expects log-probabilities."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
teacher = nn.Linear(20, 5).requires_grad_(False)
y = teacher(3 * x).softmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def loss_fn(outputs, targets):
    """Return the divergence from the teacher."""
    return F.kl_div(outputs.softmax(1), targets, reduction="batchmean")  # BUG
    # CONTROL: return F.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")


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
