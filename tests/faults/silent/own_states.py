"""States that are loaded, and are those that the module has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from faults.silent.loop import Loop, control, fault, perceptron, train

Keep = Callable[[nn.Module], object]


def best_weights_at_the_end(keep: Keep) -> None:
    """Keep the weights after the third step, and load them after the last."""
    model = perceptron()
    kept = {}
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=8)

    def after_step(step: int) -> None:
        if step == 2:
            kept["best"] = keep(model)
        if step == 7:
            model.load_state_dict(kept["best"])  # type: ignore[arg-type]

    loop.after_step = after_step
    loop.run()


@fault(rule="not_restored", kind="own_state", severity="warning", step=8, names="its own tensors")
def best_weights_that_are_not_copied(injected: bool) -> None:
    best_weights_at_the_end(nn.Module.state_dict if injected else lambda m: copy.deepcopy(m.state_dict()))


def with_target(load: Callable[[nn.Module, nn.Module], object]) -> None:
    """Train towards the values of a target, which ``load(target, model)`` updates every other step."""
    model = perceptron()
    target = copy.deepcopy(model).requires_grad_(False)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=8)
    loss_of = loop.loss_of
    loop.loss_of = lambda out, y: loss_of(out, y) + 0.1 * (out - target(torch.ones(1, 4))).square().mean()
    loop.after_step = lambda step: load(target, model) if step % 2 else None
    loop.run()


def from_model(target: nn.Module, model: nn.Module) -> None:
    target.load_state_dict(model.state_dict())


@fault(rule="not_restored", kind="own_state", severity="warning", step=2, names="Sequential.load_state_dict")
def target_that_loads_itself(injected: bool) -> None:
    with_target((lambda target, _: from_model(target, target)) if injected else from_model)


@control
def own_state_before_the_first_step() -> None:
    """A state is loaded again so that hooks run."""
    model = perceptron()
    model.load_state_dict(model.state_dict())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def part_of_the_state_is_of_another_model() -> None:
    """``state.update(...)`` keeps what the other state does not have."""
    other = perceptron()

    def load(target: nn.Module, model: nn.Module) -> None:
        state = target.state_dict()
        state |= {key: value for key, value in other.state_dict().items() if key.startswith("0.")}
        target.load_state_dict(state)

    with_target(load)


@control
def state_that_is_assigned() -> None:
    """The tensors of the state become those of the module, which had others."""
    with_target(lambda target, model: target.load_state_dict(copy.deepcopy(model.state_dict()), assign=True))


@control
def average_for_an_evaluation() -> None:
    """The weights that come back are copies."""
    model = perceptron()
    average = copy.deepcopy(model).requires_grad_(False)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=8)

    def after_step(step: int) -> None:
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average.state_dict())
        model.load_state_dict(trained)

    loop.after_step = after_step
    loop.run()


@control
def state_of_an_optimizer_that_is_its_own() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = Loop(model, optimizer, steps=8)
    loop.after_step = lambda step: optimizer.load_state_dict(optimizer.state_dict())
    loop.run()


@control
def weights_saved_to_memory_and_back() -> None:
    """Each tensor goes through numpy, which shares memory only where it is asked to."""
    model = perceptron()
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=8)

    def after_step(step: int) -> None:
        arrays = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})

    loop.after_step = after_step
    loop.run()
