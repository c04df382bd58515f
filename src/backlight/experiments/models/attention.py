"""Causal self-attention on linear projections, so that every layer of it has per-sample gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def at_places(x_NTD: Tensor, places_N: Tensor) -> Tensor:
    """Return one position of each sample, [N, 1, width]."""
    return x_NTD[torch.arange(len(x_NTD), device=x_NTD.device), places_N][:, None]


class CausalAttention(nn.Module):
    """Multi-head attention, each position over itself and those before; [N, T, width] to the same.

    With places_N the values of one position of each sample alone are taken, [N, 1, width]: all that a
    last block needs whose answer is read there, for a fraction of the time.

    Raises
    ------
    ValueError
        If ``heads`` does not divide ``width``.
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

    def forward(self, x_NTD: Tensor, places_N: Tensor | None = None) -> Tensor:
        """Return the attended values."""
        n, t, d = x_NTD.shape
        asked_NQD = x_NTD if places_N is None else at_places(x_NTD, places_N)
        query, key, value = (
            layer(x).view(n, -1, self.heads, d // self.heads).transpose(1, 2)
            for layer, x in ((self.query, asked_NQD), (self.key, x_NTD), (self.value, x_NTD))
        )
        if places_N is None:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            # One query over a few places: products and sums are faster than the kernel for attention.
            scores_NHT = (query * key).sum(-1) * (d // self.heads) ** -0.5
            later_NT = torch.arange(t, device=x_NTD.device) > places_N[:, None]
            weights_NHT = scores_NHT.masked_fill(later_NT[:, None], -torch.inf).softmax(-1)
            mixed = (weights_NHT[..., None] * value).sum(2, keepdim=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(n, -1, d))
        return result
