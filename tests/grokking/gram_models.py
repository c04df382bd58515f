"""The matrix of models whose Grams are compared with an autograd loop: each a model, a loss and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Frames(nn.Module):
    """Folds frames into the batch dimension, as video models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x.flatten(0, 1)))
        return self.head(h.flatten(1)).unflatten(0, x.shape[:2]).sum(1)


@model(labels)
def frames() -> tuple[nn.Module, Any]:
    return Frames(), images(4, 2, 4, 4)


class GPT(nn.Module):
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


@model(tokens)
def gpt() -> tuple[nn.Module, Any]:
    return GPT(tied=False), text()


@model(tokens)
def gpt_tied_padded_reused() -> tuple[nn.Module, Any]:
    return GPT(tied=True, times=2, padding=3), text()


@model(tokens)
def gpt_checkpointed() -> tuple[nn.Module, Any]:
    return GPT(tied=True, times=2, reentrant=False), text()


@model(tokens)
def gpt_checkpointed_reentrant() -> tuple[nn.Module, Any]:
    return GPT(tied=True, times=2, reentrant=True), text()


@model(tokens, *KERNELS, "vmap")
def positions_as_long_as_the_batch() -> tuple[nn.Module, Any]:
    net = GPT(tied=False)
    net.pos = nn.Embedding(N, 8)
    return net, text(length=N)


class Attention(nn.Module):
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


@model(tokens, *KERNELS, "vmap")
def multihead_attention() -> tuple[nn.Module, Any]:
    return Attention(batch_first=True), text()


@model(tokens, *KERNELS, "vmap")
def multihead_attention_sequence_first() -> tuple[nn.Module, Any]:
    return Attention(batch_first=False), text()


@model(tokens, *KERNELS, "vmap")
def encoder_layer() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11)), text()


class Bare(nn.Module):
    """Bare parameters, a functional use of a module's weight, a function that vmap knows nothing of."""

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
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * delta


@model(labels, *KERNELS, "vmap")
def bare_parameters() -> tuple[nn.Module, Any]:
    return Bare(), images(7)


@model(labels, *KERNELS, "loop")
def bare_parameters_without_vmap() -> tuple[nn.Module, Any]:
    return Bare(loop=True), images(7)


class Recurrent(nn.Module):
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


@model(labels)
def recurrent() -> tuple[nn.Module, Any]:
    return Recurrent(), images(4, 3)


@model(labels, *KERNELS, "vmap")
def weight_norm() -> tuple[nn.Module, Any]:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(7, 9))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(9, 3)), images(7)


@model(labels)
def compiled() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    return torch.compile(net, backend="eager"), images(7)
