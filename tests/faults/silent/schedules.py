"""Steps of learning rate schedules at the wrong time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
)
from torch.utils.data import DataLoader

from faults.silent.batches import samples
from faults.silent.loop import control, fault, perceptron

BATCHES = 12
EPOCHS = 2


def scheduled(
    make: Callable[[torch.optim.Optimizer], LRScheduler], *, per_batch: bool, before: bool = False
) -> None:
    """Train for two epochs of 12 batches with a schedule."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = make(optimizer)
    loader = DataLoader(samples(8 * BATCHES), batch_size=8, shuffle=True)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if per_batch and before:
                schedule.step()
            optimizer.step()
            if per_batch and not before:
                schedule.step()
        if not per_batch:
            schedule.step()


@fault(rule="schedule", kind="per_batch", severity="warning", step=3, names="CosineAnnealingLR")
def cosine_of_epochs_stepped_per_batch(injected: bool) -> None:
    scheduled(lambda optimizer: CosineAnnealingLR(optimizer, T_max=EPOCHS), per_batch=injected)


@fault(rule="schedule", kind="per_batch", severity="warning", step=2, names="MultiStepLR")
def decay_of_epochs_stepped_per_batch(injected: bool) -> None:
    scheduled(lambda optimizer: MultiStepLR(optimizer, [1, 2], gamma=0.02), per_batch=injected)


@fault(rule="schedule", kind="before_optimizer", severity="info", step=0, names="LambdaLR")
def schedule_before_the_optimizer(injected: bool) -> None:
    scheduled(lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step), per_batch=True, before=injected)


@control
def cosine_of_all_steps() -> None:
    scheduled(lambda optimizer: CosineAnnealingLR(optimizer, T_max=EPOCHS * BATCHES), per_batch=True)


@control
def one_cycle() -> None:
    scheduled(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * BATCHES + 1), per_batch=True)


@control
def first_step_skipped_by_the_scaler() -> None:
    """torch warns that the schedule comes first, which is not true."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(optimizer, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for x, y in DataLoader(samples(96), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) * 8).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
