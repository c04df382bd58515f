"""An LSTM reads the batch as time: `batch_first` is missing."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    """An LSTM and a head for its last output."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 32)  # BUG
        # CONTROL: self.lstm = nn.LSTM(8, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        """Return the scores of two classes."""
        return self.head(self.lstm(x)[0][:, -1])


x = torch.randn(512, 12, 8)
y = (x[:, :, 0].sum(1) > 0).long()
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
