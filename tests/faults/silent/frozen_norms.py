"""Frozen networks with batch norms below a part that is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from faults.silent.loop import batches, control, fault

STEPS = 10


class Classifier(nn.Module):
    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def train_head(
    prepare: Callable[[Classifier], object],
    after_step: Callable[[Classifier], object] = lambda _: None,
    *,
    affine: bool = True,
    frozen: bool = True,
) -> None:
    """Train what is not frozen."""
    model = Classifier(affine=affine)
    model.backbone.requires_grad_(not frozen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()
    prepare(model)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after_step(model)


def nothing(_: Classifier) -> None:
    """Leave the mode."""


@fault(
    rule="module_modes", kind="frozen_statistics", severity="info", step=4, names="change their statistics"
)
def frozen_backbone_in_training_mode(injected: bool) -> None:
    train_head(nothing if injected else lambda model: model.backbone.eval())


@control
def backbone_that_is_trained() -> None:
    train_head(nothing, frozen=False)


@control
def norm_without_weights() -> None:
    train_head(nothing, affine=False)


@control
def norm_without_momentum() -> None:
    def stop(model: Classifier) -> None:
        model.backbone[1].momentum = 0.0

    train_head(stop)


@control
def momentum_encoder_in_the_model() -> None:
    """Its weights follow those of the network that is trained."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.online(x) - self.target(x.flip(1))).square().mean()

    model = Pair()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
    for x, _ in batches(STEPS):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(model.target.parameters(), model.online.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
