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


MODELS: dict[str, Callable[[], Setup]] = {}


def model(
    loss: Callable[[nn.Module, Any], Tensor], *methods: str
) -> Callable[[Callable[[], tuple[nn.Module, Any]]], Callable[[], tuple[nn.Module, Any]]]:
    """Register a model with its batch; ``methods`` are those that its parameters may be measured by."""

    def decorate(build: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
        def setup() -> Setup:
            net, batch = build()
            return Setup(net.to(DOUBLE), loss, batch, frozenset(methods or KERNELS))

        MODELS[build.__name__] = setup
        return build

    return decorate


KERNELS = ("ghost", "chunked", "vectors", "unused")


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


@model(labels)
def mlp() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)), images(7)


@model(labels)
def mlp_of_one_sample() -> tuple[nn.Module, Any]:
    x, y = images(7)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)), (x[:1], y[:1])


@model(squares)
def conv1d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv1d(6, 6, 3, groups=6, padding="same", dilation=2),
        nn.Conv1d(6, 2, 3, padding=1, padding_mode="circular", bias=False),
    )
    return net, torch.randn(N, 4, 12, dtype=DOUBLE)


@model(squares)
def conv2d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), padding_mode="reflect"),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="replicate", groups=2),
        nn.Conv2d(4, 3, 2, padding="valid", dilation=(1, 2)),
    )
    return net, torch.randn(N, 3, 7, 6, dtype=DOUBLE)


@model(squares)
def conv3d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3), padding=1, groups=2), nn.Tanh(), nn.Conv3d(4, 2, 2))
    return net, torch.randn(N, 2, 3, 4, 4, dtype=DOUBLE)


@model(labels)
def cnn_with_running_statistics() -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )  # fmt: skip
    net(torch.randn(8, 2, 5, 5))
    return net.eval(), images(2, 5, 5)


@model(labels)
def frames() -> tuple[nn.Module, Any]:
    return zoo.FrameConvolution(), images(4, 2, 4, 4)


@model(tokens)
def gpt() -> tuple[nn.Module, Any]:
    return zoo.Gpt(tied=False), text()


@model(tokens)
def gpt_tied_padded_reused() -> tuple[nn.Module, Any]:
    return zoo.Gpt(tied=True, times=2, padding=3), text()


@model(tokens)
def gpt_checkpointed() -> tuple[nn.Module, Any]:
    return zoo.Gpt(tied=True, times=2, reentrant=False), text()


@model(tokens)
def gpt_checkpointed_reentrant() -> tuple[nn.Module, Any]:
    return zoo.Gpt(tied=True, times=2, reentrant=True), text()


@model(tokens, *KERNELS, "vmap")
def positions_as_long_as_the_batch() -> tuple[nn.Module, Any]:
    net = zoo.Gpt(tied=False)
    net.pos = nn.Embedding(N, 8)
    return net, text(length=N)


@model(tokens, *KERNELS, "vmap")
def multihead_attention() -> tuple[nn.Module, Any]:
    return zoo.SelfAttention(batch_first=True), text()


@model(tokens, *KERNELS, "vmap")
def multihead_attention_sequence_first() -> tuple[nn.Module, Any]:
    return zoo.SelfAttention(batch_first=False), text()


@model(tokens, *KERNELS, "vmap")
def encoder_layer() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11)), text()


@model(labels, *KERNELS, "vmap")
def bare_parameters() -> tuple[nn.Module, Any]:
    return zoo.BareParameters(), images(7)


@model(labels, *KERNELS, "loop")
def bare_parameters_without_vmap() -> tuple[nn.Module, Any]:
    return zoo.BareParameters(loop=True), images(7)


@model(labels)
def recurrent() -> tuple[nn.Module, Any]:
    return zoo.RecurrentCell(), images(4, 3)


@model(labels, *KERNELS, "vmap")
def weight_norm() -> tuple[nn.Module, Any]:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(7, 9))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(9, 3)), images(7)


@model(labels)
def compiled() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    return torch.compile(net, backend="eager"), images(7)
