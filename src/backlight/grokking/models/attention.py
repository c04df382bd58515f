"""Causal self-attention on linear projections, so that every layer of it has per-sample gradients."""

from __future__ import annotations

from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Multi-head attention, each position over itself and those before; [N, T, width] to the same.

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

    def forward(self, x_NTD: Tensor) -> Tensor:
        """Return the attended values."""
        n, t, d = x_NTD.shape
        query, key, value = (
            layer(x_NTD).view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return result
