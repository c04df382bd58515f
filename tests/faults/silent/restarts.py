"""Optimizers that are created anew while a model is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import batches, control, fault, perceptron

EPOCHS = 5
STEPS = 4

Make = Callable[[int, nn.Module], torch.optim.Optimizer]


def epochs_of(
    make: Make, before: Callable[[int, nn.Module], object] = lambda *_: None, steps: int = STEPS
) -> None:
    """Train for some epochs, each with the optimizer that ``make(epoch, model)`` returns."""
    model = perceptron()
    for epoch in range(EPOCHS):
        before(epoch, model)
        optimizer = make(epoch, model)
        for x, y in batches(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def adam(_: int, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def once(make: Make) -> Make:
    """Return what creates one optimizer per model."""
    made: dict[int, torch.optim.Optimizer] = {}
    return lambda epoch, model: made.setdefault(id(model), made.get(id(model)) or make(epoch, model))


@fault(rule="trained_tensors", kind="state_lost", severity="warning", step=2 * STEPS, names="Adam is created")
def adam_created_in_every_epoch(injected: bool) -> None:
    epochs_of(adam if injected else once(adam))


def steps_of(make: Make, count: int = 24, each: int = 1) -> None:
    """Take so many times ``each`` steps, with the optimizer that ``make(number, model)`` returns."""
    model = perceptron()
    for number in range(count):
        optimizer = make(number, model)
        for x, y in batches(each):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@fault(rule="trained_tensors", kind="state_lost", severity="warning", step=16, names="17 times")
def adam_created_in_every_step(injected: bool) -> None:
    steps_of(adam if injected else once(adam))


@control
def search_of_three_steps_each() -> None:
    steps_of(adam, 10, 3)


@control
def search_of_one_step_each() -> None:
    steps_of(adam, 15)


@control
def plain_descent_created_in_every_step() -> None:
    steps_of(plain)


def momentum(_: int, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@fault(rule="trained_tensors", kind="state_lost", severity="warning", step=2 * STEPS, names="5 times")
def momentum_created_in_every_epoch(injected: bool) -> None:
    epochs_of(momentum if injected else once(momentum))


def with_the_former_state() -> Make:
    states: list[dict[str, Any]] = []
    made: list[torch.optim.Optimizer] = []

    def make(epoch: int, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(epoch, model)
        if made:
            states.append(made[-1].state_dict())
            optimizer.load_state_dict(states[-1])
        made.append(optimizer)
        return optimizer

    return make


def with_other_rates(epoch: int, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3 * 0.5**epoch)


def rebuilt_once(unfreezes: bool) -> Make:
    """Create another optimizer for the second stage, perhaps with a layer that was frozen."""
    made: dict[bool, torch.optim.Optimizer] = {}

    def make(epoch: int, model: nn.Module) -> torch.optim.Optimizer:
        if (epoch > 1) not in made:
            next(model.children()).requires_grad_(epoch > 1 or not unfreezes)
            trained = [p for p in model.parameters() if p.requires_grad]
            made[epoch > 1] = torch.optim.Adam(trained, lr=1e-3)
        return made[epoch > 1]

    return make


def used_in_turns() -> Make:
    made: list[torch.optim.Optimizer] = []

    def make(epoch: int, model: nn.Module) -> torch.optim.Optimizer:
        while len(made) < 2:
            made.append(adam(epoch, model))
        return made[epoch % 2]

    return make


def three_made_first() -> Make:
    made: list[torch.optim.Optimizer] = []

    def make(epoch: int, model: nn.Module) -> torch.optim.Optimizer:
        while len(made) < 3:
            made.append(adam(epoch, model))
        return made[epoch % 3]

    return make


def plain(_: int, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def of_other_classes(epoch: int, model: nn.Module) -> torch.optim.Optimizer:
    kind = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW)[epoch % 3]
    return kind(model.parameters(), lr=1e-3)


MAKES: dict[str, Callable[[], Make]] = {
    "adam_with_the_former_state": with_the_former_state,
    "adam_with_other_rates": lambda: with_other_rates,
    "adam_rebuilt_for_unfrozen_layers": lambda: rebuilt_once(unfreezes=True),
    "adam_rebuilt_once": lambda: rebuilt_once(unfreezes=False),
    "two_optimizers_in_turns": used_in_turns,
    "three_optimizers_in_turns": three_made_first,
    "plain_descent_created_in_every_epoch": lambda: plain,
    "optimizers_of_other_classes": lambda: of_other_classes,
}


def _control(name: str, maker: Callable[[], Make]) -> None:
    def loop() -> None:
        epochs_of(maker())

    loop.__name__ = name
    control(loop)


for key, value in MAKES.items():
    _control(key, value)


def rate_finder() -> None:
    """The weights are restored before each trial."""
    weights = {name: value.clone() for name, value in perceptron().state_dict().items()}
    epochs_of(adam, lambda _, model: model.load_state_dict(weights))


def normal_by_data(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight.data.normal_(0.0, 0.2)
        layer.bias.data.zero_()


def xavier(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)


def reset(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        layer.reset_parameters()


def with_one_seed(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        with torch.random.fork_rng():
            torch.manual_seed(layer.out_features)
            layer.reset_parameters()


def _folds(initialise: Callable[[nn.Module], None]) -> None:
    def loop() -> None:
        epochs_of(adam, lambda _, model: model.apply(initialise))

    loop.__name__ = f"folds_initialised_by_{initialise.__name__}"
    control(loop)


for function in (normal_by_data, xavier, reset, with_one_seed):
    _folds(function)


@control
def folds_that_begin_with_a_copy_of_the_weights() -> None:
    initial: list[Tensor] = []

    def restore(_: int, model: nn.Module) -> None:
        with torch.no_grad():
            initial.extend([] if initial else [p.clone() for p in model.parameters()])
            for parameter, value in zip(model.parameters(), initial, strict=True):
                parameter.copy_(value)

    epochs_of(adam, restore)


@control
def trials_of_batch_sizes() -> None:
    epochs_of(adam, steps=3)


@control
def model_created_in_every_fold() -> None:
    for _ in range(3):
        model = perceptron()
        optimizer = adam(0, model)
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def closures(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    for x, y in batches(3):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        yield closure


@control
def second_order_that_restarts() -> None:
    model = perceptron()
    for _ in range(4):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        for closure in closures(model):
            optimizer.step(closure)
