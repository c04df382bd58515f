"""Two networks with an optimizer each, one of which takes no step, or few, or later."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from faults.silent.loop import control, fault

STEPS = 60

Due = Callable[[int], bool]


def adversaries(
    generator_steps: Due,
    generator_clears: Due = lambda _: True,
    *,
    detaches: bool = True,
    is_momentum: bool = False,
) -> None:
    """Train a discriminator, and a generator in the steps that ``generator_steps`` names."""
    generator, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    first = torch.optim.SGD(generator.parameters(), lr=0.01, momentum=0.9 * is_momentum)
    second = torch.optim.Adam(judge.parameters(), lr=1e-3)
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    loss = F.binary_cross_entropy_with_logits
    for step in range(STEPS):
        fake = generator(torch.randn(8, 4))
        second.zero_grad()
        judged = judge(fake.detach() if detaches else fake)
        (loss(judged, zeros) + loss(judge(torch.randn(8, 6) + 1), ones)).backward()
        second.step()
        if generator_clears(step):
            first.zero_grad()
            loss(judge(generator(torch.randn(8, 4))), ones).backward()
        if generator_steps(step):
            first.step()


@fault(rule="trained_tensors", kind="never_stepped", severity="warning", step=54, names="never takes a step")
def optimizer_that_takes_no_step(injected: bool) -> None:
    adversaries(lambda _: not injected)


@fault(rule="trained_tensors", kind="never_stepped", severity="warning", step=54, names="SGD")
def optimizer_with_momentum_that_takes_no_step(injected: bool) -> None:
    adversaries(lambda _: not injected, is_momentum=True)


@control
def generator_that_steps_every_ninth_time() -> None:
    adversaries(lambda step: step % 9 == 8)


@control
def generator_that_waits_without_being_cleared() -> None:
    """The loss of the discriminator reaches the generator, whose turn has not come."""
    adversaries(lambda step: step > 56, lambda step: step > 56, detaches=False)


@control
def generator_that_is_trained_by_hand() -> None:
    """The script updates the weights itself, and uses the optimizer to clear gradients."""
    generator, target = nn.Linear(4, 6), nn.Linear(6, 3)
    first = torch.optim.SGD(generator.parameters(), lr=0.01)
    second = torch.optim.Adam(target.parameters(), lr=1e-3)
    for _ in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        target(generator(torch.randn(8, 4))).square().mean().backward()
        with torch.no_grad():
            for parameter in generator.parameters():
                parameter.sub_(0.01 * torch.as_tensor(parameter.grad))
        second.step()


@control
def second_optimizer_of_the_same_parameters() -> None:
    """It is made for a later stage that the run does not reach."""
    model = nn.Linear(4, 3)
    optimizers = [make(model.parameters(), lr=1e-3) for make in (torch.optim.Adam, torch.optim.SGD)]
    for _ in range(STEPS):
        optimizers[0].zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizers[0].step()
