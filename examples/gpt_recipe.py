"""A recipe: a character-level GPT, for the commands that build and call the model themselves.

backlight spectra examples/gpt_recipe.py --checkpoints 'checkpoints/*.pt' --replicates 16
backlight memory predict examples/gpt_recipe.py --set batch=64 --set seq=1024
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a perceptron, each after a LayerNorm and around a residual connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, vocabulary: int, seq: int, dim: int, heads: int, n_blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.position.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(
    dim: int = 64, heads: int = 4, n_blocks: int = 2, seq: int = 64, vocabulary: int = 256, seed: int = 0
) -> nn.Module:
    """Return a model with weights that follow from ``seed``."""
    torch.manual_seed(seed)
    return GPT(vocabulary, seq, dim, heads, n_blocks)


def build_optimizer(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return AdamW over every parameter."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def batches(
    rank: int, world_size: int, batch: int = 8, seq: int = 64, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows of text and their targets without end; ranks draw from disjoint parts of the text."""
    codes = text()
    share = len(codes) // world_size
    part = codes[rank * share : (rank + 1) * share]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(part) - seq - 1, (batch,), generator=generator)
        windows = torch.stack([part[start : start + seq + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy per character."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def split(name: str, tensor: Tensor) -> dict[str, Tensor] | None:
    """Split the fused attention weight into its three matrices."""
    if not name.endswith("qkv.weight"):
        return None
    q, k, v = tensor.chunk(3, dim=0)
    return {f"{name}:q": q, f"{name}:k": k, f"{name}:v": v}


@cache
def text() -> Tensor:
    """Return the bytes of some modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(content[:1_000_000]), dtype=torch.uint8).long()
