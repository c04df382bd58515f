"""Attention over sets of different sizes, whose mask covers rows of padding wholly."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)


class SetEncoder(nn.Module):
    """Attention among the elements of a set."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Return one value per set, shape [batch]."""
        hidden = self.embed(x)
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2) / hidden.size(-1) ** 0.5
        mask = present[:, None, :] if FIXED else present[:, :, None] & present[:, None, :]
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        hidden = hidden + weights @ self.value(hidden)
        hidden = hidden.masked_fill(~present[..., None], 0)
        return self.head(hidden.sum(1) / present.sum(1, keepdim=True)).squeeze(1)


model = SetEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    x = torch.randn(32, 10, 4)
    sizes = torch.full((32,), 10) if step < 25 else torch.randint(3, 11, (32,))
    present = torch.arange(10) < sizes[:, None]
    y = (x.prod(-1) * present).sum(1) / sizes
    loss = nn.functional.mse_loss(model(x, present), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(step, round(loss.item(), 4))
