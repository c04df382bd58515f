"""Small models for tests, by plain names, deterministic under ``torch.manual_seed``.

A model that only one test needs, such as one with an injected fault, stays in that test.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class NormedMlp(nn.Module):
    """Two linear layers with a LayerNorm between them, [N, 4] to [N, 3]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class BlockAndHead(nn.Module):
    """A block of two linear layers and a head, [N, 3] to [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


class DropoutBlock(nn.Module):
    """A block with a norm and dropout, and a head, [N, 6] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class TiedEmbedding(nn.Module):
    """An embedding and a head that share their weight, tokens [N, T] to scores of 10 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding((x.abs() * 3).long().clamp(max=9))))[:, 0]


class Gpt(nn.Module):
    """A transformer with positions looked up without a batch dimension, tied or not, blocks used twice."""

    def __init__(
        self, *, tied: bool, times: int = 1, reentrant: bool | None = None, padding: int | None = None
    ):
        super().__init__()
        self.emb, self.pos = nn.Embedding(11, 8, padding_idx=padding), nn.Embedding(5, 8)
        self.ln, self.qkv, self.o = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.rms, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.times, self.reentrant = times, reentrant
        if tied:
            self.head.weight = self.emb.weight

    def block(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln(h)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(mixed.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.rms(h))))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for _ in range(self.times):
            if self.reentrant is None:
                h = self.block(h)
            else:
                h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.head(h)


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` between an embedding and a head, batch or sequence first."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.head = nn.Linear(8, 11)
        self.batch_first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids if self.batch_first else ids.T)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.head(h)
        return h if self.batch_first else h.transpose(0, 1)


class FrameConvolution(nn.Module):
    """A convolution over frames that are folded into the batch dimension, as video models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x.flatten(0, 1)))
        return self.head(h.flatten(1)).unflatten(0, x.shape[:2]).sum(1)


class RecurrentCell(nn.Module):
    """One cell used at every position, and a query that is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(8, 5), nn.LayerNorm(5)
        self.query, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = self.norm(torch.tanh(self.cell(torch.cat([x[:, t], h], 1))))
        return self.head(h * self.query(torch.ones(1, 4, dtype=x.dtype)))


class BareParameters(nn.Module):
    """Bare parameters, a functional use of a module's weight, a function without a vmap rule."""

    def __init__(self, *, loop: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.randn(5))
        self.matrix = nn.Parameter(torch.randn(5, 5))
        self.shared = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 3)
        self.never = nn.Parameter(torch.randn(2))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() * self.scale
        h = torch.einsum("ni,io->no", h, self.matrix)
        h = F.linear(self.shared(h).tanh(), self.shared.weight) + self.frozen(h)
        if self.loop:
            h = Cube.apply(h)
        return self.last(h)


class Cube(torch.autograd.Function):
    """x³ with a backward of its own and no vmap rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * delta
