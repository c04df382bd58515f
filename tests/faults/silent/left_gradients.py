"""Gradients of a loss that was not meant for the step that uses them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import batches, control, fault, perceptron

STEPS = 8


def adversaries(
    between: Callable[[torch.optim.Optimizer, nn.Module], object], *, detaches: bool = True
) -> None:
    """Train a generator, and then its discriminator; ``between`` comes after the step of the generator."""
    generator, discriminator = perceptron(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.05)
    for x, _ in batches(STEPS):
        fake = generator(x)
        F.softplus(-discriminator(fake)).mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        between(of_discriminator, discriminator)
        scores = discriminator(fake.detach() if detaches else generator(x).detach())
        (F.softplus(scores).mean() + F.softplus(-discriminator(torch.randn(len(x), 3))).mean()).backward()
        of_discriminator.step()
        of_discriminator.zero_grad()
        discriminator.requires_grad_(True)


def clear(optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
    optimizer.zero_grad()


@fault(
    rule="gradients_not_cleared", kind="other", severity="warning", step=1, names="another optimizer's loss"
)
def discriminator_keeps_gradients_of_the_generator(injected: bool) -> None:
    adversaries((lambda *_: None) if injected else clear)


@control
def discriminator_cleared_to_zeros() -> None:
    adversaries(lambda optimizer, _: optimizer.zero_grad(set_to_none=False))


@control
def discriminator_cleared_through_data() -> None:
    adversaries(lambda _, module: [p.grad.data.zero_() for p in module.parameters() if p.grad is not None])


@control
def two_optimizers_of_one_backward() -> None:
    """The head is given what the body computes, and both are updated after the same backward."""
    body, head = perceptron(), nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
    for x, y in batches(STEPS):
        F.cross_entropy(head(body(x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@control
def body_of_two_heads() -> None:
    """Each head has its own loss and step; the body adds up the gradients of both."""
    body, heads = perceptron(), [nn.Linear(3, 3), nn.Linear(3, 3)]
    of_body = torch.optim.SGD(body.parameters(), lr=0.1)
    of_heads = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
    for x, y in batches(STEPS):
        for head, optimizer in zip(heads, of_heads, strict=True):
            F.cross_entropy(head(body(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        of_body.step()
        of_body.zero_grad()


@control
def critic_that_is_cleared_before_its_loss() -> None:
    """Of an agent: the actor's loss runs through the critic, which clears its gradients before its own."""
    actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for x, y in batches(STEPS):
        of_critic.zero_grad()
        F.mse_loss(critic(torch.cat([x, actor(x).detach()], 1))[:, 0], y.float()).backward()
        of_critic.step()
        of_actor.zero_grad()
        (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
        of_actor.step()


def epochs(evaluate: Callable[[nn.Module, torch.optim.Optimizer], object], steps: int = 3) -> None:
    """Train for four epochs of some steps, and evaluate after each."""
    model = perceptron(nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model.train()
        for x, y in batches(steps):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        evaluate(model, optimizer)


def losses(model: nn.Module) -> list[Tensor]:
    return [F.cross_entropy(model(x), y) for x, y in batches(2)]


def propagate(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for loss in losses(model):
        loss.backward()


@fault(rule="gradients_not_cleared", kind="evaluation", severity="error", step=3, names="2 backward passes")
def loss_of_an_evaluation_is_propagated(injected: bool) -> None:
    epochs(propagate if injected else lambda model, _: losses(model))


@control
def gradients_of_an_evaluation_are_cleared() -> None:
    """As those that measure the importance of weights."""

    def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        propagate(model, optimizer)
        optimizer.zero_grad()

    epochs(measure, 10)


@control
def gradients_of_an_evaluation_are_set_to_zero() -> None:
    def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        propagate(model, optimizer)
        optimizer.zero_grad(set_to_none=False)

    epochs(measure, 10)


@control
def examples_made_in_evaluation_mode() -> None:
    """Of adversarial training: gradients of the attack are cleared before the step."""
    model = perceptron(nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        model.eval()
        moved = x.clone().requires_grad_()
        F.cross_entropy(model(moved), y).backward()
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x + 0.1 * moved.grad.sign()), y).backward()  # type: ignore[union-attr]
        optimizer.step()
