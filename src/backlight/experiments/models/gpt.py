"""A decoder like GPT-2: pre-norm, GELU, learned positions, head tied to the embedding, no dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.experiments.data.knowledge import NO_TOKEN
from backlight.experiments.models.attention import CausalAttention, at_places


class GptBlock(nn.Module):
    """LayerNorm and attention, LayerNorm and a GELU layer of four widths, both added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, bias=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_NTD: Tensor, places_N: Tensor | None = None) -> Tensor:
        """Return the next residual stream, [N, T, width]; [N, 1, width] with one place of each sample."""
        attended = self.attention(self.attention_norm(x_NTD), places_N)
        x_NTD = (x_NTD if places_N is None else at_places(x_NTD, places_N)) + attended
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
        for block in list(self.blocks)[:-1]:
            x_NTD = block(x_NTD)
        # The answer is read at one position, so the last block computes no other.
        x_N1D = self.norm(self.blocks[-1](x_NTD, (tokens_NT != NO_TOKEN).sum(1) - 1))
        result: Tensor = self.head(x_N1D[:, 0])
        return result
