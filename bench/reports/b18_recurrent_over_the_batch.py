"""A recurrent layer gets [batch, time, features] unannounced: it runs over the samples of the batch."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)


class Agent(nn.Module):
    """Action values from a sequence of observations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=FIXED)
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the four actions, shape [batch, 4]."""
        outputs, _ = self.lstm(self.embed(x).relu())
        return self.head(outputs[:, -1])


model = Agent()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(250):
    x = torch.randn(32, 12, 6)
    labels = x[:, :, :4].sum(1).argmax(1)
    loss = nn.functional.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, loss.item())
