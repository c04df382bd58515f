"""Optimizers inside the wrappers and containers of frameworks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from backlight.capture.engines import underlying


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


class Passive(torch.optim.Optimizer):
    """A wrapper such as Accelerate's: a subclass of ``Optimizer`` whose ``__init__`` never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(torch.optim.Optimizer):
    """An optimizer that calls another one and has its own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {"lr": 1.0})

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_wrappers_and_containers_resolve_to_optimizers() -> None:
    one, two = sgd(), sgd()
    assert underlying(one) == [one]
    assert underlying(Passive(Passive(one))) == [one]
    container = SimpleNamespace(optimizers=[Passive(one), two], param_groups=[])
    assert underlying(container) == [one, two]


def test_wrapper_with_its_own_step_is_kept() -> None:
    outer = Lookahead(sgd())
    assert underlying(outer) == [outer]
