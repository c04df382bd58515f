"""Recipe of five models for `memory_prediction.py`, with precision, kernel of attention and dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from language_model import LanguageModel
from torch import Tensor, nn

SIZES = {
    "gpt": {"vocabulary": 8192, "length": 256, "width": 256, "heads": 4, "layers": 4},
    "gpt_wide": {"vocabulary": 4096, "length": 128, "width": 1024, "heads": 16, "layers": 2},
}
SMALL = {"vocabulary": 64, "length": 16, "width": 32, "heads": 2, "layers": 2}
_settings = {"precision": "fp32", "kind": "cuda"}


class Encoder(nn.Module):
    """Torch's own encoder layers over an embedding."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[N, T, vocabulary]``."""
        logits: Tensor = self.head(self.encoder(self.embedding(ids)))
        return logits


def _model(model: str, attention: str, dropout: float, *, is_small: bool) -> nn.Module:
    width = 32 if is_small else 512
    match model:
        case "mlp":
            layers = [nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)] * 4
            return nn.Sequential(*layers, nn.Linear(width, 10))
        case "cnn":
            channels = 4 if is_small else 64
            blocks = [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()] * 3
            end = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16 * channels, 10)]
            return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *blocks, *end)
        case "encoder":
            return Encoder(64 if is_small else 4096, width, 2, dropout)
    size = SMALL if is_small else SIZES[model]
    return LanguageModel(**size, is_fused=attention == "sdpa", dropout=dropout)


def build_model(
    model: str = "gpt",
    precision: str = "fp32",
    attention: str = "sdpa",
    dropout: float = 0.1,
    kind: str = "cuda",
    small: int = 0,
) -> nn.Module:
    """Return a model; ``kind`` is the device whose autocast is used."""
    _settings.update(precision=precision, kind=kind)
    return _model(model, attention, dropout, is_small=bool(small))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with the default of the device."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(
    rank: int, world_size: int, model: str = "gpt", small: int = 0, batch: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets."""
    batch = 4 if small else batch
    while True:
        if model == "mlp":
            yield torch.randn(64 * batch, 32 if small else 512), torch.randint(10, (64 * batch,))
        elif model == "cnn":
            yield torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        else:
            size = SMALL if small else SIZES.get(model, {"vocabulary": 4096, "length": 128})
            shape = batch, size["length"]
            yield tuple(torch.randint(size["vocabulary"], shape) for _ in range(2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch."""
    is_autocast = _settings["precision"] == "autocast"
    context = torch.autocast(_settings["kind"], torch.bfloat16) if is_autocast else contextlib.nullcontext()
    with context:
        out = model(batch[0])
        return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())
