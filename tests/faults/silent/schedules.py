"""Steps of learning rate schedules at the wrong time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader

from faults.silent.batches import samples
from faults.silent.loop import Loop, batches, control, fault, perceptron

STEPS = 12
EPOCHS = 2
LONG = 5


def scheduled(
    make: Callable[[torch.optim.Optimizer], LRScheduler],
    *,
    per_batch: bool,
    before: bool = False,
    epochs: int = EPOCHS,
) -> None:
    """Train for some epochs of 12 steps with a schedule."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer)
    loop = Loop(model, optimizer, epochs=epochs, has_schedule=False)
    loop.loader = DataLoader(samples(8 * STEPS * loop.habits.microbatches), batch_size=8, shuffle=True)
    if isinstance(schedule, ReduceLROnPlateau):
        loop.after_epoch = lambda _: schedule.step(1.0)
    elif not per_batch:
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


def one_cycle_of_epochs(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, epochs=LONG, steps_per_epoch=STEPS)


@fault(rule="schedule", kind="per_epoch", severity="warning", step=2 * STEPS, names="`steps_per_epoch=12`")
def one_cycle_stepped_per_epoch(injected: bool) -> None:
    scheduled(one_cycle_of_epochs, per_batch=not injected, epochs=LONG)


def one_cycle_of_total_steps(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=LONG * STEPS)


@fault(rule="schedule", kind="per_epoch", severity="warning", step=LONG * STEPS, names="for 60 steps")
def one_cycle_of_total_steps_stepped_per_epoch(injected: bool) -> None:
    scheduled(one_cycle_of_total_steps, per_batch=not injected, epochs=LONG)


@fault(rule="schedule", kind="per_epoch", severity="info", step=LONG * STEPS, names="for 60 steps")
def cosine_of_all_steps_stepped_per_epoch(injected: bool) -> None:
    scheduled(lambda one: CosineAnnealingLR(one, LONG * STEPS), per_batch=not injected, epochs=LONG)


def gone_at_the_end(make: Callable[[torch.optim.Optimizer], LRScheduler], *, per_batch: bool) -> None:
    """Train in a function whose schedule ends with it, while the run goes on."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer)
    for _ in range(LONG):
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if per_batch:
                schedule.step()
        if not per_batch:
            schedule.step()


@fault(rule="schedule", kind="per_epoch", severity="warning", step=LONG * STEPS, names="for 60 steps")
def one_cycle_of_a_function_stepped_per_epoch(injected: bool) -> None:
    gone_at_the_end(one_cycle_of_total_steps, per_batch=not injected)


@control
def cosine_of_a_function_that_ends_with_the_run() -> None:
    gone_at_the_end(lambda one: CosineAnnealingLR(one, LONG * STEPS), per_batch=True)


@control
def cosine_of_epochs_of_a_function() -> None:
    gone_at_the_end(lambda one: CosineAnnealingLR(one, LONG), per_batch=False)


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, LONG - 2)]
    return SequentialLR(optimizer, parts, [2])


def per_microbatch(make: Callable[[torch.optim.Optimizer], LRScheduler], *, per_batch: bool) -> None:
    """Accumulate gradients over 4 microbatches, with a step of the schedule for each, or per update."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer)
    for number, (x, y) in enumerate(batches(4 * STEPS)):
        (F.cross_entropy(model(x), y) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        if per_batch or number % 4 == 3:
            schedule.step()


@fault(rule="schedule", kind="past_end", severity="warning", step=3, names="takes 4 steps per step")
def cosine_stepped_per_microbatch(injected: bool) -> None:
    per_microbatch(lambda one: CosineAnnealingLR(one, STEPS), per_batch=injected)


@control
def cosine_of_microbatches() -> None:
    per_microbatch(lambda one: CosineAnnealingLR(one, 4 * STEPS), per_batch=True)


@control
def warm_restarts_per_microbatch() -> None:
    per_microbatch(lambda one: CosineAnnealingWarmRestarts(one, STEPS), per_batch=True)


@control
def cosine_that_rises_again_on_purpose() -> None:
    per_microbatch(lambda one: CosineAnnealingLR(one, 3), per_batch=False)


def on_plateau(mode: Literal["min", "max"], metrics: Sequence[float], patience: int = 0) -> None:
    """Train a step for each metric."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ReduceLROnPlateau(optimizer, mode, patience=patience)
    for metric, (x, y) in zip(metrics, batches(len(metrics)), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step(metric)


FALLING = [2.0 * 0.8**step for step in range(4)]


@fault(rule="schedule", kind="wrong_direction", severity="warning", step=3, names="mode='max'")
def loss_that_is_maximised(injected: bool) -> None:
    on_plateau("max" if injected else "min", FALLING)


@fault(rule="schedule", kind="wrong_direction", severity="info", step=3, names="mode='min'")
def accuracy_that_is_minimised(injected: bool) -> None:
    on_plateau("min" if injected else "max", [0.3, 0.5, 0.6, 0.7])


@control
def accuracy_that_stays() -> None:
    on_plateau("max", [0.6, 0.58, 0.59, 0.57, 0.58, 0.59])


@control
def accuracy_that_rose_before_it_fell() -> None:
    on_plateau("max", [0.5, 0.8, 0.7, 0.6, 0.5, 0.4])


@control
def loss_with_patience() -> None:
    on_plateau("max", FALLING, patience=2)


PER_EPOCH: dict[str, tuple[Callable[[torch.optim.Optimizer], LRScheduler], int]] = {
    "cosine_of_epochs": (lambda one: CosineAnnealingLR(one, LONG), LONG),
    "cosine_of_epochs_that_is_stopped_early": (lambda one: CosineAnnealingLR(one, 50), LONG),
    "one_cycle_of_epochs_alone": (lambda one: OneCycleLR(one, 0.1, total_steps=LONG), LONG),
    "one_cycle_of_one_step_per_epoch": (
        lambda one: OneCycleLR(one, 0.1, epochs=LONG, steps_per_epoch=1),
        LONG,
    ),
    "one_cycle_that_is_stopped_early": (lambda one: OneCycleLR(one, 0.1, total_steps=100), LONG),
    "warm_restarts": (lambda one: CosineAnnealingWarmRestarts(one, T_0=LONG * STEPS), LONG),
    "plateau": (lambda one: ReduceLROnPlateau(one, patience=2), LONG),
    "steps_of_epochs": (lambda one: MultiStepLR(one, [2, 4]), LONG),
    "function_of_epochs": (lambda one: LambdaLR(one, lambda epoch: 1 / (1 + epoch)), LONG),
    "warm_up_of_epochs": (warm_up_and_cosine, LONG),
}
"""Sound schedules that take one step per epoch, and epochs."""


def _per_epoch_control(name: str) -> None:
    def loop() -> None:
        make, epochs = PER_EPOCH[name]
        scheduled(make, per_batch=False, epochs=epochs)

    loop.__name__ = name
    control(loop)


for one in PER_EPOCH:
    _per_epoch_control(one)


@control
def one_cycle_with_gradient_accumulation() -> None:
    """Its arguments count batches, of which the optimizer takes four per step."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.1, epochs=LONG, steps_per_epoch=4 * STEPS)
    loop = Loop(model, optimizer, epochs=LONG, microbatches=4, has_schedule=False)
    loop.loader = DataLoader(samples(8 * STEPS * 4), batch_size=8, shuffle=True)
    loop.after_update = lambda _: schedule.step()
    loop.run()


@control
def one_cycle_that_is_stopped_after_two_epochs() -> None:
    scheduled(lambda one: OneCycleLR(one, 0.1, epochs=9, steps_per_epoch=STEPS), per_batch=True, epochs=3)


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
