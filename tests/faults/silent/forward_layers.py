"""Layers that a forward creates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from faults.silent.loop import control, fault, train


class Projecting(nn.Module):
    """A model whose hidden layer is what ``layer(self)`` returns in each forward."""

    def __init__(self, layer: Callable[[Projecting], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.kept, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.kept(self.first(x)))
        return self.last(self.layer(self)(hidden).relu())


def kept(model: Projecting) -> nn.Module:
    return model.kept


@fault(rule="trained_tensors", kind="made_in_forward", severity="error", step=1, names="Linear is created in")
def linear_created_in_forward(injected: bool) -> None:
    train(Projecting((lambda _: nn.Linear(16, 16)) if injected else kept), is_compiled=False)


@fault(
    rule="trained_tensors", kind="made_in_forward", severity="warning", step=1, names="LayerNorm is created"
)
def norm_created_in_forward(injected: bool) -> None:
    train(Projecting((lambda _: nn.LayerNorm(16)) if injected else kept), is_compiled=False)


def lazily(model: Projecting) -> nn.Module:
    """Build a layer in the first forward, which an optimizer of all layers takes in."""
    if not hasattr(model, "lazy"):
        model.lazy = nn.Linear(16, 16).requires_grad_(False)
    return model.lazy


def fixed(_: Projecting) -> nn.Module:
    """A random projection that is not to be trained."""
    return nn.Linear(16, 16).requires_grad_(False)


def without_gradients(model: Projecting) -> nn.Module:
    with torch.no_grad():
        shift = nn.Linear(16, 16)(torch.ones(16))
    return nn.Sequential(model.kept, Shift(shift))


class Shift(nn.Module):
    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def container_of_kept_layers(model: Projecting) -> nn.Module:
    return nn.Sequential(model.kept, nn.ReLU(), model.norm)


def generated(model: Projecting) -> nn.Module:
    """Weights that another layer computes."""
    scale = model.norm.weight.sigmoid()
    return Shift(scale)


def called_by_function(model: Projecting) -> nn.Module:
    weights = {"weight": model.kept.weight * 0.5, "bias": model.kept.bias}
    return Shift(torch.func.functional_call(model.kept, weights, torch.ones(16)))


def per_shape(model: Projecting) -> nn.Module:
    """Layers that are kept for the shape of the input."""
    table = model.__dict__.setdefault("shapes", {})
    return table.setdefault("16", nn.Identity())


def loss_layer(model: Projecting) -> nn.Module:
    nn.CrossEntropyLoss()
    return nn.Dropout(0.1)


LAYERS = [
    lazily,
    fixed,
    without_gradients,
    container_of_kept_layers,
    generated,
    called_by_function,
    per_shape,
    loss_layer,
]


def _control(layer: Callable[[Projecting], nn.Module]) -> None:
    def loop() -> None:
        train(Projecting(layer), is_compiled=False)

    loop.__name__ = f"forward_with_{layer.__name__}"
    control(loop)


for function in LAYERS:
    _control(function)
