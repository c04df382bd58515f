"""Recipe of ``published_memory.py``: ViT-L/16 as in torchvision, BERT-large as in Transformers, in torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, HIDDEN = 1024, 16, 24, 4096


class ImageBlock(nn.Module):
    """A block of ViT, with dropout of probability 0."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next layer takes, or the logits."""
        y = self.before_attention(x)
        x = self.attention(y, y, y, need_weights=False)[0] + x
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class ImageModel(nn.Module):
    """ViT-L/16."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 197, WIDTH))
        self.blocks = nn.Sequential(*(ImageBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return what the next layer takes, or the logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


class TextBlock(nn.Module):
    """Attention as it was computed before torch had a fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.after_attention, self.after_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout, self.drop_weights, self.drop_last = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return what the next layer takes, or the logits."""
        query, key, value = (
            layer(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2)
        scores = scores / math.sqrt(WIDTH / HEADS)
        weights = self.drop_weights(functional.softmax(scores + mask, -1))
        mixed = (weights @ value).transpose(1, 2).contiguous().flatten(2)
        x = self.after_attention(self.dropout(self.out(mixed)) + x)
        hidden = functional.gelu(self.wide(x))
        return self.after_mlp(self.drop_last(self.narrow(hidden)) + x)  # type: ignore[no-any-return]


class TextModel(nn.Module):
    """BERT-large with a classifier; ``recomputes``: its blocks are checkpointed."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, WIDTH) for n in (30522, 512, 2))
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(TextBlock() for _ in range(LAYERS))
        self.pooled, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what the next layer takes, or the logits."""
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.words(tokens) + self.kinds(torch.zeros_like(tokens)) + self.places(places)
        x = self.dropout(self.norm(x))
        mask = torch.zeros(len(tokens), 1, 1, tokens.shape[1])
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=True) if self.recomputes else block(x, mask)  # type: ignore[assignment]
        return self.head(torch.tanh(self.pooled(x[:, 0])))  # type: ignore[no-any-return]


def build_model(
    model: str = "vit", precision: str = "fp32", checkpointing: bool = False, before: str = ""
) -> nn.Module:
    """Return the model; ``precision`` is fp32, fp16_autocast or bf16.

    Gradients of the step ``before`` are there in the forward: until it is ``over``, or ``added`` to.
    """
    built: Any = ImageModel(10) if model == "vit" else TextModel(recomputes=checkpointing)
    built.region, built.before = precision == "fp16_autocast", before
    return built.to(torch.bfloat16) if precision == "bf16" else built  # type: ignore[no-any-return]


def build_optimizer(model: nn.Module, each: bool = False) -> torch.optim.Optimizer:
    """Return Adam, which goes from parameter to parameter where ``each`` is set."""
    return torch.optim.Adam(model.parameters(), lr=5e-5, foreach=False if each else None)


def batches(
    rank: int, world_size: int, model: str = "vit", batch: int = 64, precision: str = "fp32"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images of 224 x 224 or texts of 512 tokens, with their classes."""
    while True:
        if model == "vit":
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            yield torch.zeros(batch, 3, 224, 224, dtype=dtype), torch.zeros(batch, dtype=torch.long)
        else:
            yield torch.zeros(batch, 512, dtype=torch.long), torch.zeros(batch, dtype=torch.long)


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy."""
    given, wanted = batch
    if model.before:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with torch.autocast("cuda", torch.float16, enabled=model.region):
        result = functional.cross_entropy(model(given), wanted)
    if model.before == "over":
        for parameter in model.parameters():
            parameter.grad = None
    return result
