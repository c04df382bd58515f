"""`torch.where` around a square root of zero: its gradient is NaN."""

import torch
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    """The length of each row, or 0."""

    def forward(self, x):
        """Append the length of each row."""
        squares = x.square().sum(1, keepdim=True)
        length = torch.where(squares > 0, squares.sqrt(), 0.0)  # BUG
        # CONTROL: length = (squares + 1e-12).sqrt()
        return torch.cat([x, length], 1)


x = torch.randn(512, 20)
x[300:310] = 0.0
y = (x @ torch.randn(20, 5)).argmax(1)
model = nn.Sequential(nn.Linear(20, 64, bias=False), nn.Tanh(), Norm(), nn.Linear(65, 5))
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
