"""The transformers of the experiments: Power et al., Wang et al. (like GPT-2) and Nanda et al."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backlight.experiments.data.algorithmic import NO_TOKEN


def at_positions(x_NTD: Tensor, positions_N: Tensor) -> Tensor:
    """Return one position of each sample, [N, 1, width]."""
    return x_NTD[torch.arange(len(x_NTD), device=x_NTD.device), positions_N][:, None]


class CausalAttention(nn.Module):
    """Multi-head attention, each position over itself and those before; [N, T, width] to the same.

    With positions_N only one position of each sample is computed, [N, 1, width]: all that the last block
    needs when the answer is read there, for a fraction of the time. Projections are linear layers, so that
    every parameter has per-sample gradients by a kernel.
    """

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}; change model.heads")
        self.heads = heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_NTD: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Return the attended values."""
        n, t, d = x_NTD.shape
        asked_NQD = x_NTD if positions_N is None else at_positions(x_NTD, positions_N)
        query, key, value = (
            layer(x).view(n, -1, self.heads, d // self.heads).transpose(1, 2)
            for layer, x in ((self.query, asked_NQD), (self.key, x_NTD), (self.value, x_NTD))
        )
        if positions_N is None:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            # One query over a few positions: products and sums are faster than the kernel for attention.
            scores_NHT = (query * key).sum(-1) * (d // self.heads) ** -0.5
            later_NT = torch.arange(t, device=x_NTD.device) > positions_N[:, None]
            weights_NHT = scores_NHT.masked_fill(later_NT[:, None], -torch.inf).softmax(-1)
            mixed = (weights_NHT[..., None] * value).sum(2, keepdim=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(n, -1, d))
        return result


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

    def forward(self, x_NTD: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Return the next residual stream, [N, T, width]; [N, 1, width] with one position of each sample."""
        attended = self.attention(x_NTD, positions_N)
        x_NTD = self.attention_norm(
            (x_NTD if positions_N is None else at_positions(x_NTD, positions_N)) + attended
        )
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


class GptBlock(nn.Module):
    """LayerNorm and attention, LayerNorm and a GELU layer of four widths, both added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, bias=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_NTD: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Return the next residual stream, [N, T, width]; [N, 1, width] with one position of each sample."""
        attended = self.attention(self.attention_norm(x_NTD), positions_N)
        x_NTD = (x_NTD if positions_N is None else at_positions(x_NTD, positions_N)) + attended
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
        positions_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device).expand_as(tokens_NT)
        x_NTD = self.embed(tokens_NT.clamp(min=0)) + self.positions(positions_NT)
        for block in list(self.blocks)[:-1]:
            x_NTD = block(x_NTD)
        # The answer is read at one position, so the last block computes no other.
        x_N1D = self.norm(self.blocks[-1](x_NTD, (tokens_NT != NO_TOKEN).sum(1) - 1))
        result: Tensor = self.head(x_N1D[:, 0])
        return result


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
        positions_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device).expand_as(tokens_NT)
        x_NTD = self.embed(tokens_NT) + self.positions(positions_NT)
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x_NTD = x_NTD + attention(x_NTD)
            x_NTD = x_NTD + down(torch.relu(up(x_NTD)))
        result: Tensor = self.unembed(x_NTD[:, -1])
        return result
