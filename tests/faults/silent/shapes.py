"""Views that move an axis, and norms over a single value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import STEPS, control, fault, perceptron, train

SAMPLES, LENGTH, HEADS, WIDTH = 6, 10, 4, 32


def sequences(
    length: int = LENGTH, samples: int = SAMPLES, width: int = WIDTH
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return batches of sequences ``[samples, length, width]`` with one class each."""
    return lambda count: (
        (torch.randn(samples, length, width), torch.randint(0, 3, (samples,))) for _ in range(count)
    )


class Attention(nn.Module):
    """Attention with heads; ``split`` and ``merge`` are how they are made and joined."""

    def __init__(
        self,
        split: Callable[[Tensor], Tensor],
        merge: Callable[[Tensor], Tensor],
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
    ) -> None:
        super().__init__()
        self.split, self.merge, self.attend = split, merge, attend
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.split(layer(x)) for layer in (self.query, self.key, self.value)]
        return self.head((x + self.out(self.merge(self.attend(*parts)))).mean(1))


def product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merge(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def split_by_view(x: Tensor) -> Tensor:
    return x.view(len(x), HEADS, x.shape[1], -1)


def swap_by_view(x: Tensor) -> Tensor:
    return x.view(len(x), x.shape[1], HEADS, -1).reshape(len(x), HEADS, x.shape[1], -1)


def merge_by_reshape(y: Tensor) -> Tensor:
    return y.reshape(len(y), y.shape[2], -1)


@fault(rule="loss_input", severity="warning", step=1, kind="moved_axis", names="[6, 10, 32] as [6, 4, 10, 8]")
def heads_by_view(injected: bool) -> None:
    train(Attention(split_by_view if injected else split, merge), data=sequences(), is_compiled=False)


@fault(
    rule="loss_input", severity="warning", step=1, kind="moved_axis", names="[6, 12, 4, 8] as [6, 4, 12, 8]"
)
def heads_and_positions_by_reshape(injected: bool) -> None:
    """Where the heads divide the positions, the operands of a product of matrices show it."""
    model = Attention(swap_by_view if injected else split, merge, product)
    train(model, data=sequences(12), is_compiled=False)


@fault(rule="loss_input", severity="warning", step=1, kind="moved_axis", names="[6, 4, 10, 8] as [6, 10, 32]")
def heads_that_are_not_moved_back(injected: bool) -> None:
    train(Attention(split, merge_by_reshape if injected else merge), data=sequences(), is_compiled=False)


class Convolved(nn.Module):
    """Gives the channels of a convolution ``[N, C, T]`` to a recurrent layer ``[N, T, C]``."""

    def __init__(self, *, by_view: bool) -> None:
        super().__init__()
        self.by_view = by_view
        self.convolution = nn.Conv1d(WIDTH, 8, 3, padding=1)
        self.recurrent, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x.transpose(1, 2))
        y = y.view(len(y), -1, 8) if self.by_view else y.transpose(1, 2)
        return self.head(self.recurrent(y)[0][:, -1])


@fault(rule="loss_input", severity="warning", step=1, kind="moved_axis", names="[6, 8, 10] as [6, 10, 8]")
def channels_by_view(injected: bool) -> None:
    train(Convolved(by_view=injected), data=sequences(), is_compiled=False)


def tagged(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return ((torch.randn(SAMPLES, LENGTH, 4), torch.randint(0, 3, (SAMPLES, LENGTH))) for _ in range(count))


@fault(rule="loss_input", severity="warning", step=1, kind="moved_axis", names="[6, 10, 3] as [6, 3, 10]")
def classes_by_view(injected: bool) -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.view(-1, 3, LENGTH) if injected else out.transpose(1, 2), y)

    train(perceptron(), loss_of=loss_of, data=tagged, is_compiled=False)


@control
def heads_along_the_batch() -> None:
    """``[T, N, C]`` as ``[T, N * H, D]``, with as many samples as features of a head."""
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    head = nn.Linear(WIDTH, 3)
    train(
        lambda x: head(layer(x, x, x)[0].mean(1)),
        parts=[layer, head],
        data=sequences(samples=WIDTH // HEADS),
    )


class Relative(nn.Module):
    """Skews scores of relative positions by a view, as Transformer-XL and Music Transformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.positions = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.pad(self.query(x) @ self.positions.T, (1, 0))
        scores = scores.view(len(x), LENGTH + 1, LENGTH)[:, 1:].tril()
        return self.head((scores.softmax(-1) @ x).mean(1))


@control
def relative_positions_that_are_skewed() -> None:
    train(Relative(), data=sequences(), is_compiled=False)


class Windows(nn.Module):
    """Attention in windows of a sequence, which are split off and merged again."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.inside, self.head = size, Attention(split, merge), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, self.size, WIDTH)
        parts = [self.inside.split(layer(windows)) for layer in (self.inside.query, self.inside.key)]
        y = self.inside.merge(self.inside.attend(*parts, parts[1]))
        return self.head(y.view(len(x), -1, WIDTH).mean(1))


@control
def attention_in_windows() -> None:
    """A window has as many positions as the batch has samples."""
    train(Windows(SAMPLES), data=sequences(3 * SAMPLES), is_compiled=False)


@control
def capsules() -> None:
    """Channels of a convolution are split into capsules along with its positions."""
    convolution, head = nn.Conv1d(WIDTH, 16, 3, padding=1), nn.Linear(8, 3)
    train(
        lambda x: head(convolution(x.transpose(1, 2)).view(len(x), -1, 8).mean(1)),
        parts=[convolution, head],
        data=sequences(),
        is_compiled=False,
    )


@control
def channels_that_are_shuffled() -> None:
    """ShuffleNet splits channels, transposes the groups, and merges them."""
    first, head = nn.Conv1d(WIDTH, 12, 1), nn.Linear(12, 3)

    def model(x: Tensor) -> Tensor:
        y = first(x.transpose(1, 2))
        return head(y.view(len(x), 3, 4, -1).transpose(1, 2).reshape(len(x), 12, -1).mean(2))

    train(model, parts=[first, head], data=sequences(), is_compiled=False)


@control
def weights_that_are_viewed() -> None:
    """A parameter has no positions: its values may be stored in any order."""
    weight = nn.Parameter(torch.randn(4, 3))
    head = nn.Linear(4, 3)
    head.register_parameter("bank", weight)
    train(lambda x: head(x) @ weight.view(3, 4)[:, :3], parts=[head], is_compiled=False)


def pooled(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Unflatten(1, (16, 1)), norm, nn.Flatten(), nn.Linear(16, 3))


@fault(rule="loss_input", severity="error", step=0, kind="norm_of_one_value", names="`2.weight`")
def group_norm_of_pooled_channels(injected: bool) -> None:
    train(pooled(nn.GroupNorm(16 if injected else 4, 16)), is_compiled=False)


@fault(rule="loss_input", severity="error", step=0, kind="norm_of_one_value", names="[8, 16, 1]")
def layer_norm_of_one_feature(injected: bool) -> None:
    """The last axis has one value."""
    train(pooled(nn.LayerNorm(1) if injected else nn.LayerNorm((16, 1))), is_compiled=False)


class Scalar(nn.Module):
    """Normalises the one output of a branch by the function."""

    def __init__(self, *, injected: bool) -> None:
        super().__init__()
        self.gate, self.head, self.injected = nn.Linear(4, 1 if injected else 2), nn.Linear(4, 3), injected

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.head(x * F.layer_norm(gate, gate.shape[-1:]).sum(1, keepdim=True).sigmoid() + x)


@fault(rule="loss_input", severity="error", step=0, kind="norm_of_one_value", names="A layer norm has")
def functional_norm_of_one_feature(injected: bool) -> None:
    train(Scalar(injected=injected), is_compiled=False, steps=STEPS)


@control
def instance_norm_of_positions() -> None:
    """One group per channel, over several positions."""
    head = nn.Linear(4, 3)
    norm = nn.GroupNorm(4, 4)
    train(
        lambda x: head(norm(x.unsqueeze(-1) * torch.arange(1.0, 4.0)).mean(2)),
        parts=[head, norm],
        is_compiled=False,
    )
