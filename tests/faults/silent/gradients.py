"""Gradients that are used twice, or by no optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import STEPS, Loop, batches, control, fault, nothing, perceptron, train


@fault(rule="gradients_not_cleared", severity="error", step=1, names="`0.weight`")
def no_zero_grad(injected: bool) -> None:
    model = perceptron()
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if injected:
        loop.clear = nothing
    loop.run()


@fault(rule="gradients_not_cleared", severity="error", step=1, names="1 of 1 followed parameters")
def zero_grad_of_the_model_only(injected: bool) -> None:
    """The optimizer also holds a temperature, which is no parameter of the model."""
    model, temperature = perceptron(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    loop = Loop(model, optimizer, loss_of=lambda out, y: F.cross_entropy(out * temperature, y))
    if injected:
        loop.clear = lambda: model.zero_grad(set_to_none=loop.habits.sets_to_none)
    loop.run()


@fault(rule="gradients_discarded", severity="error", step=0, names="`0.weight`")
def zero_grad_before_the_step(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = Loop(model, optimizer)
    # A gradient scaler raises where there is no gradient.
    sets_to_none = loop.habits.sets_to_none and not loop.habits.has_scaler
    if injected:
        loop.before_update = lambda _: optimizer.zero_grad(set_to_none=sets_to_none)
    loop.run()


@fault(rule="gradients_discarded", severity="error", step=0, names="3 of 4 backward passes")
def zero_grad_at_every_microbatch(injected: bool) -> None:
    loop = Loop(perceptron(), microbatches=4)
    if injected:
        loop.before_microbatch = lambda _: loop.clear()
    loop.run()


def cleared_between(injected: bool, microbatches: int, cleared: int) -> None:
    """Clear what was accumulated before microbatch number ``cleared`` of each step."""
    loop, count = Loop(perceptron(), microbatches=microbatches), itertools.count()
    if injected:
        loop.before_microbatch = lambda _: next(count) % microbatches == cleared and loop.clear()
    loop.run()


@fault(rule="gradients_discarded", severity="error", step=0, names="3 of 4 backward passes")
def zero_grad_before_the_last_microbatch(injected: bool) -> None:
    """What is cleared holds the gradients of all microbatches before."""
    cleared_between(injected, 4, 3)


@fault(rule="gradients_discarded", severity="error", step=0, names="1 of 2 backward passes")
def zero_grad_after_the_first_microbatch(injected: bool) -> None:
    cleared_between(injected, 2, 1)


def clip_step(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.parameters, 0.1)


@fault(rule="clipping", severity="warning", step=1, names="tests/faults/silent/gradients.py:")
def clipped_before_backward(injected: bool) -> None:
    loop = Loop(perceptron(), clips="")
    if injected:
        loop.before_step = lambda _: clip_step(loop)
    else:
        loop.before_update = lambda _: (loop.unscale(), clip_step(loop))
    loop.run()


@fault(rule="clipping", severity="warning", step=1, names="tests/faults/silent/gradients.py:")
def clipped_behind_clearing(injected: bool) -> None:
    """Gradients are None there, or zero."""
    loop = Loop(perceptron(), clips="", clears="start", microbatches=1)
    if injected:
        loop.before_microbatch = lambda _: clip_step(loop)
    loop.run()


@control
def clipped_in_every_microbatch() -> None:
    """Clip what was accumulated so far, before each backward but the first."""
    loop = Loop(perceptron(), clips="", microbatches=2, has_scaler=False)
    count = itertools.count()
    loop.before_backward = lambda _: next(count) % 2 and clip_step(loop)
    loop.run()


@control
def clipped_before_and_after() -> None:
    """Clip where it changes nothing, and where it does."""
    loop = Loop(perceptron(), clips="norm")
    loop.before_step = lambda _: clip_step(loop)
    loop.run()


@control
def clipped_gradients_of_autograd_grad() -> None:
    """Clip gradients that the script has set, before a backward adds those of another loss."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(parameters, 0.1)
        (1e-3 * sum(p.square().sum() for p in parameters)).backward()
        optimizer.step()


@control
def clipped_gradients_of_the_last_batch() -> None:
    """Clip and use at the start of a step what the end of the one before has left."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        if number:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()


@control
def two_clipped_models_in_turn() -> None:
    """Clip each of two models after its own backward."""
    models = perceptron(), perceptron()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for x, y in batches():
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


@control
def clipped_once_before_the_loop() -> None:
    model = perceptron()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    train(model)


@control
def zeros_through_data() -> None:
    """``.data.zero_()`` does not change the version of a gradient."""
    model = perceptron()

    def clear() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()

    loop = Loop(model)
    loop.clear = clear
    loop.run()


@control
def clipped_zeros() -> None:
    """Clipping writes to gradients that backward left at zero, as those of a constant reward are."""
    loop = Loop(perceptron(), clips="norm")
    loop.loss_of = lambda out, y: F.cross_entropy(out, y) * (loop.step % 2)
    loop.run()


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
def generator_that_gets_no_gradient() -> None:
    """Train against a detached fake, of which rule ``no_gradient`` has a finding: this is no second one."""
    generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    of_generator, of_critic = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (generator, critic))
    for x, _ in batches():
        fake = generator(x).detach()
        of_critic.zero_grad()
        (critic(fake) - critic(torch.randn(8, 2))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake)).mean().backward()
        of_generator.step()


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
    train(
        perceptron(),
        loss_of=lambda out, y: F.cross_entropy(out, y) * 1e3,
        has_scaler=True,
        init_scale=2.0**127,
    )


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


def clipped(parameters: Any, loop: Loop) -> None:
    loop.before_update = lambda _: (loop.unscale(), nn.utils.clip_grad_norm_(parameters(), 0.1))
    loop.run()


@fault(rule="clipping", severity="error", step=0, names="tests/faults/silent/gradients.py:")
def clipped_by_an_exhausted_iterator(injected: bool) -> None:
    loop = Loop(perceptron(), clips="")
    trained = filter(lambda p: p.requires_grad, loop.parameters)
    parameters = trained if injected else list(trained)
    list(parameters)  # what an optimizer does with it
    clipped(lambda: parameters, loop)


@fault(rule="clipping", severity="error", step=0, names="none of which has a gradient")
def clipped_another_model(injected: bool) -> None:
    loop, other = Loop(perceptron(), clips=""), perceptron()
    clipped(other.parameters if injected else lambda: loop.parameters, loop)


@control
def clipped_some_parameters() -> None:
    """One of two groups, and a parameter that is frozen."""
    loop, frozen = Loop(perceptron(), clips=""), nn.Parameter(torch.ones(2), requires_grad=False)
    clipped(lambda: [frozen, *loop.parameters[:2]], loop)


@control
def clipped_what_is_trained_in_turn() -> None:
    """Two networks that step in turn, both of which are clipped at every step."""
    first, second = perceptron(), perceptron()
    turns = itertools.cycle([first, second])

    def model(x: Tensor) -> Any:
        return next(turns)(x)

    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]
    loop = Loop(model, *optimizers, clips="", parts=[first, second], evaluates=False, averages=False)

    def clip(_: int) -> None:
        loop.unscale()
        for part in (first, second):
            nn.utils.clip_grad_norm_(part.parameters(), 0.1)

    loop.before_update = clip
    loop.run()


@control
def clipped_gradients_by_hand() -> None:
    """Tensors of gradients, which have none of their own."""
    loop = Loop(perceptron(), clips="")

    def clip(_: int) -> None:
        loop.unscale()
        gradients = [p.grad for p in loop.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(loop.parameters, 0.1, norm)

    loop.before_update = clip
    loop.run()


@control
def clipped_a_part_that_no_loss_reached() -> None:
    """Two parts that are trained in turn, each of which is clipped at its own steps only."""
    first, second = perceptron(), perceptron()
    turns = itertools.cycle([first, second])

    def model(x: Tensor) -> Any:
        return next(turns)(x)

    loop = Loop(model, clips="", parts=[first, second], evaluates=False, averages=False)
    clipped(lambda: [p for p in loop.parameters if p.grad is not None], loop)


@control
def rows_frozen_by_zeros() -> None:
    """Of an embedding, only a new row is trained: its gradient is all that is left."""
    embedding, head = nn.Embedding(40, 16), nn.Linear(16, 3).requires_grad_(False)
    is_frozen = torch.arange(40) != 39

    def data(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(count):
            yield torch.cat([torch.arange(32), torch.full((8,), 39)]).view(8, 5), torch.randint(0, 3, (8,))

    def freeze(_: int) -> None:
        embedding.weight.grad[is_frozen] = 0

    loop = Loop(
        lambda x: head(embedding(x).mean(1)),
        torch.optim.SGD(embedding.parameters(), lr=0.1),
        parts=(embedding, head),
        data=data,
    )
    loop.before_update = freeze
    loop.run()
