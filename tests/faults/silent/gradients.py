"""Gradients that are used twice, or by no optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from faults.silent.loop import STEPS, batches, control, fault, perceptron


@fault(rule="gradients_not_cleared", severity="error", step=1, names="`0.weight`")
def no_zero_grad(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches():
        if not injected:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@fault(rule="gradients_not_cleared", severity="error", step=1, names="1 of 1 followed parameters")
def zero_grad_of_the_model_only(injected: bool) -> None:
    """The optimizer also holds a temperature, which is no parameter of the model."""
    model, temperature = perceptron(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    for x, y in batches():
        (model if injected else optimizer).zero_grad()
        F.cross_entropy(model(x) * temperature, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@fault(rule="gradients_discarded", severity="error", step=0, names="`0.weight`")
def zero_grad_before_the_step(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        if injected:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


@fault(rule="gradients_discarded", severity="warning", step=0, names="3 of 4 backward passes")
def zero_grad_at_every_microbatch(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(4 * STEPS)):
        if injected or number % 4 == 0:
            optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        if number % 4 == 3:
            optimizer.step()


@control
def zeros_through_data() -> None:
    """``.data.zero_()`` does not change the version of a gradient."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.data.zero_()


@control
def clipped_zeros() -> None:
    """Clipping writes to gradients that backward left at zero, as those of a constant reward are."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (number % 2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@control
def zeros_between_microbatches() -> None:
    """The first microbatch has no target: its gradients are zero, and are cleared."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        (model(x).sum() * 0.0).backward()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@control
def adversarial_pair() -> None:
    """The generator's backward adds to gradients of the critic, which are cleared before its own."""
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    first, second = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, critic))
    for _ in range(STEPS):
        critic.zero_grad()
        (critic(torch.randn(8, 4)).mean() - critic(generator(torch.randn(8, 2)).detach()).mean()).backward()
        second.step()
        generator.zero_grad()
        critic(generator(torch.randn(8, 2))).mean().backward()
        first.step()


@control
def gradient_surgery() -> None:
    """The gradients of several tasks are read, cleared, and put back as one."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        taken = []
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            taken.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *taken, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        optimizer.step()


@control
def sharpness_aware() -> None:
    """SAM by hand: the first gradient moves the weights, and is cleared."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.01 * parameter.grad for parameter in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()


@control
def adversarial_examples() -> None:
    """The first backward is for the gradient of the input."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(attacked), y).backward()
        optimizer.step()


@control
def norms_of_two_tasks() -> None:
    """Of one forward, the gradients of each loss are read and cleared before those of the sum."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        out = model(x)
        losses = [F.cross_entropy(out, y), out.square().mean()]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()


@control
def steps_that_a_scaler_skips() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()


@control
def second_order_optimizer() -> None:
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for x, y in batches(4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@fault(rule="recomputation_differs", severity="error", step=0, names="tests/faults/silent/gradients.py:")
def recomputed_with_another_dropout(injected: bool) -> None:
    train_checkpointed(nn.Dropout(0.1), preserves=not injected)


@control
def recomputed_without_random_numbers() -> None:
    train_checkpointed(nn.Tanh(), preserves=False)


def train_checkpointed(last: nn.Module, *, preserves: bool) -> None:
    """Train with activation checkpointing."""
    body, head = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), last), nn.Linear(16, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for x, y in batches():
        run = torch.utils.checkpoint.checkpoint
        hidden = run(body, x, use_reentrant=False, preserve_rng_state=preserves)
        optimizer.zero_grad()
        F.cross_entropy(head(hidden), y).backward()
        optimizer.step()
