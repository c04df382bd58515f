"""Batches in the wrong order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from faults.silent.loop import STEPS, control, fault, perceptron


def epochs(
    loader: DataLoader[tuple[Tensor, ...]], before_epoch: Callable[[int], object] = lambda _: None
) -> None:
    """Train for four epochs, each with an evaluation in a fixed order."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluation = DataLoader(loader.dataset, batch_size=8)
    for epoch in range(4):
        before_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for x, y in evaluation:
                F.cross_entropy(model(x), y)


def samples(count: int = 32) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 3, (count,)))


@fault(rule="same_order_every_epoch", severity="warning", step=7, kind="order")
def seeded_in_every_epoch(injected: bool) -> None:
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    epochs(loader, lambda epoch: torch.manual_seed(0 if injected else epoch))


@fault(rule="same_order_every_epoch", severity="warning", step=7, kind="order")
def no_set_epoch(injected: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(samples(64), num_replicas=2, rank=0)
    loader = DataLoader(sampler.dataset, batch_size=8, sampler=sampler)
    epochs(loader, lambda _: None if injected else sampler.set_epoch(_))


@fault(rule="same_order_every_epoch", severity="warning", step=3, kind="batch")
def first_batch_only(injected: bool) -> None:
    loader = DataLoader(samples(), batch_size=8)
    model, endless = perceptron(), itertools.cycle(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = next(iter(loader)) if injected else next(endless)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@control
def whole_data_in_one_batch() -> None:
    epochs(DataLoader(samples(8), batch_size=8, shuffle=True))


@control
def two_batches_in_random_order() -> None:
    epochs(DataLoader(samples(16), batch_size=8, shuffle=True))
