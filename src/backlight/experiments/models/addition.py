"""The toy of Liu et al. (2205.10343): numbers are learned points, their sum is decoded by a net."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.experiments.models.mlp import Mlp


class AdditionToy(nn.Module):
    """Pairs [N, 2] of p numbers → E_a + E_b → a tanh net → [N, outputs].

    Embeddings [p, dimensions] begin uniform in (-1/2, 1/2).
    """

    def __init__(self, p: int, dimensions: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(p, dimensions)
        nn.init.uniform_(self.embed.weight, -0.5, 0.5)
        self.decoder = Mlp((dimensions, hidden, hidden, outputs), activation="tanh")

    def forward(self, pairs_N2: Tensor) -> Tensor:
        """Return the decoded vectors."""
        result: Tensor = self.decoder(torch.sum(self.embed(pairs_N2), 1))
        return result
