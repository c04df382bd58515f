"""The transformer of Nanda et al. (2301.05217): one layer, learned positions, no LayerNorm, untied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.experiments.models.attention import CausalAttention


class PlainTransformer(nn.Module):
    """Tokens [N, length] to scores at the last position, [N, vocabulary].

    Weights are normal with standard deviation 1/√width (the unembedding 1/√vocabulary), biases of the
    ReLU layer 0; attention and unembedding have none.
    """

    def __init__(
        self, vocabulary: int, length: int, *, layers: int, width: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.attentions = nn.ModuleList(CausalAttention(width, heads, bias=False) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))
        self.unembed = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=width**-0.5)
        nn.init.normal_(self.unembed.weight, std=vocabulary**-0.5)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Return the scores of the answer."""
        places_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device).expand_as(tokens_NT)
        x_NTD = self.embed(tokens_NT) + self.positions(places_NT)
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x_NTD = x_NTD + attention(x_NTD)
            x_NTD = x_NTD + down(torch.relu(up(x_NTD)))
        result: Tensor = self.unembed(x_NTD[:, -1])
        return result
