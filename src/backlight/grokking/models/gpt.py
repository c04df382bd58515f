"""A decoder like GPT-2: pre-norm, GELU, learned positions, head tied to the embedding, no dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.grokking.data.knowledge import NO_TOKEN
from backlight.grokking.models.attention import CausalAttention


class GptBlock(nn.Module):
    """LayerNorm and attention, LayerNorm and a GELU layer of four widths, both added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, bias=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_NTD: Tensor) -> Tensor:
        """Return the next residual stream, [N, T, width]."""
        x_NTD = x_NTD + self.attention(self.attention_norm(x_NTD))
        hidden = nn.functional.gelu(self.up(self.feed_forward_norm(x_NTD)), approximate="tanh")
        result: Tensor = x_NTD + self.down(hidden)
        return result


class Gpt(nn.Module):
    """Questions [N, T] to scores of the answer, [N, vocabulary].

    A question may end early with ``NO_TOKEN``; the answer is read at its last real token, which sees
    none of those after it.
    """

    def __init__(self, vocabulary: int, length: int, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Return the scores of the answer."""
        places_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device).expand_as(tokens_NT)
        x_NTD = self.embed(tokens_NT.clamp(min=0)) + self.positions(places_NT)
        x_NTD = self.norm(self.blocks(x_NTD))
        last_N = (tokens_NT != NO_TOKEN).sum(1) - 1
        picked_ND = x_NTD[torch.arange(len(x_NTD), device=x_NTD.device), last_N]
        result: Tensor = self.head(picked_ND)
        return result
