"""Optimizers and modules that hold the wrong tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import batches, classify, control, fault, perceptron


class Stack(nn.Module):
    def __init__(self, make_list: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.layers = make_list([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


@fault(rule="unregistered_modules", severity="warning", step=0, kind="Linear")
def modules_in_a_plain_list(injected: bool) -> None:
    classify(Stack(list if injected else nn.ModuleList))


@fault(rule="optimizer_of_other_tensors", severity="error", step=1)
def optimizer_of_a_copy(injected: bool) -> None:
    model = perceptron()
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((model if injected else trained).parameters(), lr=1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()


@control
def list_of_modules_that_another_optimizer_trains() -> None:
    model = Stack(tuple)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, *model.layers)]
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


@control
def loss_network_that_is_not_trained() -> None:
    """A fixed network in the loss gets gradients, which no one uses."""
    network = nn.Linear(3, 5)
    classify(perceptron(), lambda out, y: F.cross_entropy(out, y) + network(out).square().mean())
