"""The tables of injected errors and of controls, and the loop that most of them change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.injection import Fault, registrar

FAULTS: dict[str, Fault] = {}
"""Loops with an error that their argument injects."""

fault = registrar(FAULTS)

CONTROLS: dict[str, Callable[[], None]] = {}
"""Loops without an error that come close to one."""

STEPS = 10


def control(train: Callable[[], None]) -> Callable[[], None]:
    """Register a loop that has no error."""
    CONTROLS[train.__name__] = train
    return train


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(8, 4), torch.randint(0, 3, (8,))


def perceptron(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), *last)


def classify(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, steps: int = STEPS
) -> None:
    """Train a classifier without an error of the loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
