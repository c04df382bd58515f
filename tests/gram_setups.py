"""Models with a loss and a batch, whose Grams are compared with an autograd loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo

N = 6
DOUBLE = torch.float64


@dataclass(frozen=True)
class Setup:
    """A model in float64, the sum of its losses, and N samples."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any
    methods: frozenset[str]


def labels(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum")


def tokens(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["ids"])
    return F.cross_entropy(out.flatten(0, 1), batch["next"].flatten(), reduction="sum")


def squares(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch)
    assert isinstance(out, Tensor)
    return (out.reshape(len(out), -1).cumsum(1).sin() + out.reshape(len(out), -1).square()).sum()


def images(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, *shape, dtype=DOUBLE), torch.randint(0, 3, (N,))


def text(length: int = 5, vocabulary: int = 11) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (N, length + 1))
    return {"ids": ids[:, :-1], "next": ids[:, 1:]}


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv1d(6, 6, 3, groups=6, padding="same", dilation=2),
        nn.Conv1d(6, 2, 3, padding=1, padding_mode="circular", bias=False),
    )


def conv2d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), padding_mode="reflect"),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="replicate", groups=2),
        nn.Conv2d(4, 3, 2, padding="valid", dilation=(1, 2)),
    )


def conv3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3), padding=1, groups=2), nn.Tanh(), nn.Conv3d(4, 2, 2))


def cnn_with_running_statistics() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )  # fmt: skip
    net(torch.randn(8, 2, 5, 5))
    return net.eval()


def mlp(activation: nn.Module, first: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(first or nn.Linear(7, 9), activation, nn.Linear(9, 3))


def long_positions() -> nn.Module:
    net = zoo.Gpt(tied=False)
    net.pos = nn.Embedding(N, 8)
    return net


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11))


def setup(
    loss: Callable[[nn.Module, Any], Tensor], build: Callable[[], tuple[nn.Module, Any]], method: str = ""
) -> Callable[[], Setup]:
    """Return a function that builds a setup; ``method`` may measure parameters besides the kernels."""
    methods = frozenset({"ghost", "chunked", "vectors", "unused", method} - {""})

    def make() -> Setup:
        net, batch = build()
        return Setup(net.to(DOUBLE), loss, batch, methods)

    return make


weight_norm = nn.utils.parametrizations.weight_norm
MODELS: dict[str, Callable[[], Setup]] = {
    "mlp": setup(labels, lambda: (mlp(nn.ReLU(inplace=True)), images(7))),
    "mlp_of_one_sample": setup(labels, lambda: (mlp(nn.Tanh()), tuple(part[:1] for part in images(7)))),
    "conv1d": setup(squares, lambda: (conv1d(), torch.randn(N, 4, 12, dtype=DOUBLE))),
    "conv2d": setup(squares, lambda: (conv2d(), torch.randn(N, 3, 7, 6, dtype=DOUBLE))),
    "conv3d": setup(squares, lambda: (conv3d(), torch.randn(N, 2, 3, 4, 4, dtype=DOUBLE))),
    "cnn_with_running_statistics": setup(labels, lambda: (cnn_with_running_statistics(), images(2, 5, 5))),
    "frames": setup(labels, lambda: (zoo.FrameConvolution(), images(4, 2, 4, 4))),
    "gpt": setup(tokens, lambda: (zoo.Gpt(tied=False), text())),
    "gpt_tied_padded_reused": setup(tokens, lambda: (zoo.Gpt(tied=True, times=2, padding=3), text())),
    "gpt_checkpointed": setup(tokens, lambda: (zoo.Gpt(tied=True, times=2, reentrant=False), text())),
    "gpt_checkpointed_reentrant": setup(
        tokens, lambda: (zoo.Gpt(tied=True, times=2, reentrant=True), text())
    ),
    "positions_as_long_as_the_batch": setup(tokens, lambda: (long_positions(), text(length=N))),
    "multihead_attention": setup(tokens, lambda: (zoo.SelfAttention(batch_first=True), text()), "vmap"),
    "attention_sequence_first": setup(tokens, lambda: (zoo.SelfAttention(batch_first=False), text()), "vmap"),
    "encoder_layer": setup(tokens, lambda: (encoder(), text()), "vmap"),
    "bare_parameters": setup(labels, lambda: (zoo.BareParameters(), images(7)), "vmap"),
    "bare_parameters_without_vmap": setup(labels, lambda: (zoo.BareParameters(loop=True), images(7)), "loop"),
    "recurrent": setup(labels, lambda: (zoo.RecurrentCell(), images(4, 3))),
    "weight_norm": setup(labels, lambda: (mlp(nn.Tanh(), weight_norm(nn.Linear(7, 9))), images(7)), "vmap"),
    "compiled": setup(labels, lambda: (torch.compile(mlp(nn.ReLU()), backend="eager"), images(7))),
}
