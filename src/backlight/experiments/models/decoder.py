"""The decoder of Power et al. (2201.02177): post-norm, ReLU, sinusoidal positions, no bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.experiments.models.attention import CausalAttention, at_places


def sinusoids(length: int, width: int) -> Tensor:
    """Return positions [length, width]: sines in the even columns, cosines in the odd (1706.03762)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :width]


class DecoderBlock(nn.Module):
    """Attention and a ReLU layer of four widths, each followed by the sum and a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = CausalAttention(width, heads, bias=False)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x_NTD: Tensor, places_N: Tensor | None = None) -> Tensor:
        """Return the next residual stream, [N, T, width]; [N, 1, width] with one place of each sample."""
        attended = self.attention(x_NTD, places_N)
        x_NTD = self.attention_norm((x_NTD if places_N is None else at_places(x_NTD, places_N)) + attended)
        result: Tensor = self.feed_forward_norm(x_NTD + self.down(torch.relu(self.up(x_NTD))))
        return result


class Decoder(nn.Module):
    """Tokens [N, T] to scores of the token that comes next, [N, vocabulary]."""

    positions: Tensor

    def __init__(self, vocabulary: int, length: int, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.register_buffer("positions", sinusoids(length, width), persistent=False)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Return the scores at the last position."""
        n, t = tokens_NT.shape
        x_NTD = self.embed(tokens_NT) + self.positions[:t]
        for block in list(self.blocks)[:-1]:
            x_NTD = block(x_NTD)
        # The answer is read at the last position, so the last block computes no other.
        x_N1D = self.blocks[-1](x_NTD, torch.full((n,), t - 1, device=tokens_NT.device))
        result: Tensor = self.head(x_N1D[:, 0])
        return result
