"""A language model of the size of GPT-2 small in plain torch, and its training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from check import Check
from torch import Tensor, nn

FULL = {"vocabulary": 50257, "length": 512, "width": 768, "heads": 12, "layers": 12, "batch": 8}
SMALL = {"vocabulary": 64, "length": 8, "width": 16, "heads": 2, "layers": 2, "batch": 2}


class Block(nn.Module):
    """Causal attention and a feed-forward network, layer norm first."""

    def __init__(self, width: int, heads: int, *, is_fused: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.is_fused, self.dropout = heads, is_fused, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return what follows ``h [N, T, width]``."""
        n, t, width = h.shape
        q, k, v = self.qkv(self.first(h)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            mask = torch.ones(t, t, dtype=torch.bool, device=h.device).tril()
            scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
            weights = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), self.dropout)
            mixed = weights @ v
        h = h + F.dropout(self.out(mixed.transpose(1, 2).reshape(n, t, width)), self.dropout)
        return h + F.dropout(self.down(F.gelu(self.up(self.second(h)))), self.dropout)


class LanguageModel(nn.Module):
    """GPT-2; the head shares its weight with the embedding."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        heads: int,
        layers: int,
        *,
        is_fused: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        blocks = (Block(width, heads, is_fused=is_fused, dropout=dropout) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[N, T, vocabulary]``."""
        h = self.token(ids) + self.position.weight[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(h)))
        return logits


class Training:
    """The model with AdamW and one batch, in bfloat16 by autocast."""

    def __init__(self, check: Check, **settings: Any) -> None:
        torch.manual_seed(0)
        size = dict(check.choose(FULL, SMALL))
        shape = size.pop("batch"), size["length"]
        self.kind = check.kind
        self.model = LanguageModel(**size, **settings).to(check.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs, self.targets = (
            torch.randint(size["vocabulary"], shape, device=check.kind) for _ in range(2)
        )

    def step(self) -> Tensor:
        """Train one step; return its loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self.kind, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()
