"""The features of the backbone are taken with `.data`, so that it is not trained."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(20, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        """Return the scores of five classes."""
        features = self.backbone(x).data  # BUG
        # CONTROL: features = self.backbone(x)
        return self.head(F.relu(features))


x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
model = Net()
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
