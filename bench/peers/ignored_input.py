"""Both towers read the features of the user; those of the item have no effect."""

import torch
from torch import nn

torch.manual_seed(0)


class TwoTowers(nn.Module):
    """The score of a user and an item."""

    def __init__(self):
        super().__init__()
        self.user = nn.Linear(10, 16)
        self.item = nn.Linear(10, 16)

    def forward(self, x):
        """Return one score per row."""
        user = self.user(x[:, :10])
        item = self.item(x[:, :10])  # BUG
        # CONTROL: item = self.item(x[:, 10:])
        return (user * item).sum(1)


x = torch.randn(512, 20)
y = ((x[:, :10] * x[:, 10:]).sum(1) > 0).float()
model = TwoTowers()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.BCEWithLogitsLoss()

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
