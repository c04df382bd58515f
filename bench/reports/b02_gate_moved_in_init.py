"""The gate of a mixture of experts is a copy of its parameter, so it is not one."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
DTYPE = torch.float64


class Mixture(nn.Module):
    """Experts, weighted by a learned gate."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))
        self.gate = nn.Parameter(torch.zeros(16, 4))
        if not FIXED:
            gate = self.gate
            del self.gate
            self.gate = gate.to(DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of ``x``, shape [batch, 8]."""
        weights = (x @ self.gate).softmax(-1)
        scores = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights.unsqueeze(-1) * scores).sum(1)


model = Mixture().to(DTYPE)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
rules = torch.randn(4, 16, 8, dtype=DTYPE)

for step in range(300):
    x = torch.randn(128, 16, dtype=DTYPE)
    which = x[:, :4].argmax(1)
    labels = torch.einsum("bi,bio->bo", x, rules[which]).argmax(1)
    loss = nn.functional.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(step, round(loss.item(), 4))
