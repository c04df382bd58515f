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
from faults.silent.loop import Loop, control, fault, perceptron

STEPS = 12
EPOCHS = 2


def scheduled(
    make: Callable[[torch.optim.Optimizer], LRScheduler], *, per_batch: bool, before: bool = False
) -> None:
    """Train for two epochs of 12 steps with a schedule."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = make(optimizer)
    loop = Loop(model, optimizer, epochs=EPOCHS, has_schedule=False)
    loop.loader = DataLoader(samples(8 * STEPS * loop.habits.microbatches), batch_size=8, shuffle=True)
    if not per_batch:
        loop.after_epoch = lambda _: schedule.step()
    elif before:
        loop.before_update = lambda _: schedule.step()
    else:
        loop.after_update = lambda _: schedule.step()
    loop.run()


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
    scheduled(lambda optimizer: CosineAnnealingLR(optimizer, T_max=EPOCHS * STEPS), per_batch=True)


@control
def one_cycle() -> None:
    scheduled(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * STEPS + 1), per_batch=True)


@control
def first_step_skipped_by_the_scaler() -> None:
    """torch warns that the schedule comes first, which is not true."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(optimizer, gamma=0.9)
    loop = Loop(
        model,
        optimizer,
        loss_of=lambda out, y: F.cross_entropy(out, y) * 8,
        loader=DataLoader(samples(96), batch_size=8, shuffle=True),
        has_scaler=True,
        init_scale=2.0**127,
        has_schedule=False,
    )
    loop.after_update = lambda _: schedule.step()
    loop.run()
