"""States that are loaded, and are those that the module has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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


def rounds(
    before_round: Callable[[int, nn.Module], object], *, momentum: float = 0.9, is_new: bool = False
) -> None:
    """Train for four rounds of three steps; ``before_round(number, model)`` may load a state."""
    model = perceptron()

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    loop = Loop(model, optimizer(), steps=3, epochs=4)

    def before_epoch(number: int) -> None:
        before_round(number, model)
        if is_new:
            loop.optimizers[:] = [optimizer()]

    loop.before_epoch = before_epoch
    loop.run()


def initial_again(**options: Any) -> None:
    """Load the first weights before each round."""
    kept: dict[str, torch.Tensor] = {}

    def load(number: int, model: nn.Module) -> None:
        if not number:
            kept.update(copy.deepcopy(model.state_dict()))
        model.load_state_dict(kept)

    rounds(load, **options)


@fault(
    rule="weights_unchanged", kind="undone", also="step", severity="warning", step=6, names="undoes the steps"
)
def same_state_before_each_round(injected: bool) -> None:
    if injected:
        initial_again()
    else:
        rounds(lambda _, model: model.load_state_dict(copy.deepcopy(model.state_dict())))


@fault(
    rule="weights_unchanged", kind="undone", also="step", severity="info", step=6, names="undoes the steps"
)
def same_state_without_moments(injected: bool) -> None:
    if injected:
        initial_again(momentum=0)
    else:
        rounds(lambda _, model: None)


@control
def folds_with_their_own_optimizers() -> None:
    initial_again(is_new=True)


@control
def best_weights_after_each_cut_of_the_rate() -> None:
    """The last weights are not better than the first ones, and every round has a smaller rate."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = copy.deepcopy(model.state_dict())
    loop = Loop(model, optimizer, steps=3, epochs=3)

    def before_epoch(number: int) -> None:
        model.load_state_dict(kept)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number

    loop.before_epoch = before_epoch
    loop.run()


@control
def best_weights_that_come_back_once() -> None:
    kept: dict[str, torch.Tensor] = {}

    def load(number: int, model: nn.Module) -> None:
        if number == 1:
            kept.update(copy.deepcopy(model.state_dict()))
        if number == 2:
            model.load_state_dict(kept)

    rounds(load)
