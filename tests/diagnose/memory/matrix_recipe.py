"""A recipe over kinds of models, precisions, optimizers and checkpointing: prediction against measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, SEQ, DIM, BATCH = 1024, 64, 128, 16
_precision = "fp32"


class Deep(nn.Module):
    """Blocks one after the other, recomputed in backward with checkpointing."""

    def __init__(self, start: nn.Module, blocks: list[nn.Module], end: nn.Module, checkpointing: str) -> None:
        super().__init__()
        self.start, self.blocks, self.end = start, nn.ModuleList(blocks), end
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                # The state of the random number generator is not a tensor of the step, and larger than these.
                random = any(isinstance(module, nn.Dropout) for module in block.modules())
                reentrant = self.checkpointing == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=random)
        return self.end(x)


class Residual(nn.Module):
    """Layers with a residual connection."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Attention(nn.Module):
    """Causal attention with one projection for query, key and value."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, seq, dim))


class Recurrent(nn.Module):
    """The outputs of an LSTM."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def mlp(checkpointing: str) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return Deep(nn.Linear(64, 256), blocks, nn.Linear(256, 10), checkpointing)


def cnn(checkpointing: str) -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))

    end = nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    return Deep(nn.Conv2d(3, 16, 3, padding=1), [block() for _ in range(3)], end, checkpointing)


def gpt(checkpointing: str, *, tied: bool = False) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            Residual(nn.LayerNorm(DIM), Attention(DIM, 4)),
            Residual(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)),
        )

    model = Deep(
        nn.Embedding(VOCABULARY, DIM),
        [block() for _ in range(3)],
        nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)),
        checkpointing,
    )
    if tied:
        model.end[1].weight = model.start.weight
    return model


def encoder(checkpointing: str) -> nn.Module:
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True), 3, enable_nested_tensor=False
    )
    return Deep(nn.Embedding(VOCABULARY, DIM), list(layers.layers), nn.Linear(DIM, VOCABULARY), checkpointing)


def lstm(checkpointing: str) -> nn.Module:
    blocks: list[nn.Module] = [Recurrent(DIM) for _ in range(2)]
    return Deep(nn.Embedding(VOCABULARY, DIM), blocks, nn.Linear(DIM, VOCABULARY), checkpointing)


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
    "gpt_tied": lambda checkpointing: gpt(checkpointing, tied=True),
    "encoder": encoder,
    "lstm": lstm,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}
PRECISIONS = ("fp32", "autocast", "bf16")
CHECKPOINTING = ("none", "non-reentrant", "reentrant")


def build_model(model: str = "gpt", precision: str = "fp32", checkpointing: str = "none") -> nn.Module:
    global _precision  # noqa: PLW0603 - loss is given no settings
    _precision = precision
    built = MODELS[model](checkpointing)
    return built.bfloat16() if precision == "bf16" else built


def build_optimizer(model: nn.Module, optimizer: str = "adamw") -> torch.optim.Optimizer:
    return OPTIMIZERS[optimizer](model.parameters())


def batches(
    rank: int, world_size: int, model: str = "gpt", precision: str = "fp32", batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    while True:
        if model == "mlp":
            yield torch.randn(batch, 64).to(dtype), torch.randint(10, (batch,))
        elif model == "cnn":
            yield torch.randn(batch, 3, 16, 16).to(dtype), torch.randint(10, (batch,))
        else:
            yield torch.randint(VOCABULARY, (batch, SEQ)), torch.randint(VOCABULARY, (batch, SEQ))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    on = torch.autocast("cpu", torch.bfloat16) if _precision == "autocast" else nullcontext()
    with on:
        output = model(inputs)
        return F.cross_entropy(output.flatten(0, -2), targets.flatten())
