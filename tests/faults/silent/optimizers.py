"""Optimizers and modules that hold the wrong tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import Loop, control, fault, nothing, perceptron, train


class Stack(nn.Module):
    def __init__(self, make_list: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.layers = make_list([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


@fault(
    rule="trained_tensors",
    severity="error",
    step=0,
    kind="unregistered",
    names="`layers[0]` and `layers[1]`",
)
def modules_in_a_plain_list(injected: bool) -> None:
    train(Stack(list if injected else nn.ModuleList))


@fault(
    rule="trained_tensors",
    severity="error",
    step=1,
    kind="copy",
    names="AdamW holds other tensors than the Sequential",
)
def optimizer_of_a_copy(injected: bool) -> None:
    model = perceptron()
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((model if injected else trained).parameters(), lr=1e-3)
    train(trained, optimizer, has_scaler=False)  # it refuses to step without gradients


@control
def list_of_modules_that_another_optimizer_trains() -> None:
    model = Stack(tuple)
    train(model, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, *model.layers)))


@control
def loss_network_that_is_not_trained() -> None:
    """A fixed network in the loss gets gradients, which no one uses."""
    network = nn.Linear(3, 5).eval()
    train(perceptron(), loss_of=lambda out, y: F.cross_entropy(out, y) + network(out).square().mean())


@fault(rule="trained_tensors", severity="error", step=1, kind="outside", names="The Linear")
def head_in_no_optimizer(injected: bool) -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 3)
    trained = [body] if injected else [body, head]
    optimizer = torch.optim.AdamW([p for part in trained for p in part.parameters()], lr=1e-2)
    loop = Loop(lambda x: head(body(x).relu()), optimizer, parts=(body, head))
    loop.before_step = lambda _: head.zero_grad()
    loop.run()


@fault(rule="trained_tensors", severity="info", step=1, kind="target", names="copy of Sequential")
def target_network_with_gradients(injected: bool) -> None:
    """An agent whose target network is copied from the trained one now and then."""
    model, target = perceptron(), perceptron()
    target.load_state_dict(model.state_dict())

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(injected and torch.is_grad_enabled()):
            goal = 1.0 + 0.9 * target(x).amax(1)
        return model(x)[:, 0], goal

    def follow(step: int) -> None:
        if step % 5 == 4:
            target.load_state_dict(model.state_dict())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loop = Loop(forward, optimizer, loss_of=lambda out, _: F.smooth_l1_loss(*out), parts=(model,))
    loop.after_update = follow
    loop.run()


@control
def head_that_the_script_updates_itself() -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 3)

    def update(_: int) -> None:
        for parameter in head.parameters():
            parameter.data -= 0.1 * parameter.grad / loop.scaler.get_scale()
            parameter.grad = None

    loop = Loop(
        lambda x: head(body(x).relu()), torch.optim.SGD(body.parameters(), lr=0.1), parts=(body, head)
    )
    loop.after_update = update
    loop.run()


@fault(rule="trained_tensors", severity="error", step=0, kind="replaced", names="`head.weight`")
def head_replaced_after_the_optimizer(injected: bool) -> None:
    model = Stack(nn.ModuleList)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if injected:
        model.head = nn.Linear(4, 3)
    train(model, optimizer)


@fault(rule="trained_tensors", severity="error", step=1, kind="left_out", names="`0.weight` and `0.bias`")
def layer_left_out_of_the_optimizer(injected: bool) -> None:
    model = perceptron()
    train(model, torch.optim.AdamW((model[2] if injected else model).parameters(), lr=1e-3))


@fault(rule="trained_tensors", severity="warning", step=1, kind="left_out", names="`0.weight` and `0.bias`")
def loaded_layer_left_out_of_the_optimizer(injected: bool) -> None:
    """It may be meant to stay as it is."""
    model = perceptron()
    model[0].load_state_dict(nn.Linear(4, 16).state_dict())
    if not injected:
        model[0].requires_grad_(False)
    train(model, torch.optim.AdamW(model[2].parameters(), lr=1e-3))


def unfrozen(add: Callable[[torch.optim.Optimizer, nn.Module], object]) -> None:
    """Train with a first layer that is frozen until step 3; ``add(optimizer, layer)`` follows that."""
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def unfreeze(step: int) -> None:
        if step == 3:
            model[0].requires_grad_(True)
            add(optimizer, model[0])

    loop = Loop(model, optimizer, steps=24, has_schedule=False)
    loop.before_step = unfreeze
    loop.run()


def add_group(optimizer: torch.optim.Optimizer, layer: nn.Module) -> None:
    optimizer.add_param_group({"params": layer.parameters()})


@fault(rule="trained_tensors", severity="error", step=13, kind="left_out", names="They were frozen before")
def layer_unfrozen_and_in_no_optimizer(injected: bool) -> None:
    unfrozen(nothing if injected else add_group)


@control
def layers_frozen_one_after_another() -> None:
    """All are in the optimizer; the first one is frozen, unfrozen and frozen again."""
    model = perceptron()
    loop = Loop(model, steps=24, sets_to_none=True)
    loop.before_step = lambda step: model[0].requires_grad_(4 <= step < 16)
    loop.run()


@fault(rule="trained_tensors", severity="warning", step=4, kind="frozen", names="`0.weight` and `0.bias`")
def frozen_while_a_gradient_is_left(injected: bool) -> None:
    """The gradients are cleared at the end of each step, and so those of the frozen layer never again."""
    model = perceptron()

    def freeze(step: int) -> None:
        if step == 4:
            model[0].requires_grad_(False)
            if not injected:
                model[0].zero_grad()

    def clear() -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = None

    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clears="end")
    loop.before_update, loop.clear = freeze, clear
    loop.run()


@fault(rule="trained_tensors", severity="info", step=0, kind="shared", names="`layers` holds one Linear")
def one_layer_several_times(injected: bool) -> None:
    layer = nn.Linear(4, 4)
    train(Stack(lambda made: nn.ModuleList([layer] * 2 if injected else made)))


@control
def only_the_head_is_trained() -> None:
    """The body is frozen after some steps, and its gradients are cleared."""
    model = perceptron()
    loop = Loop(model, sets_to_none=True)
    loop.before_step = lambda step: model[0].requires_grad_(step < 4)
    loop.run()


@control
def activations_in_several_places() -> None:
    """Modules without weights may be used anywhere."""
    relu = nn.ReLU()
    train(nn.Sequential(nn.Linear(4, 16), relu, nn.Linear(16, 16), relu, nn.Linear(16, 3)))


@control
def branch_that_is_used_later() -> None:
    """A branch has no gradient before it is used; every parameter is in the optimizer."""
    model, branch = perceptron(), nn.Linear(3, 3)
    loop = Loop(model, parts=(model, branch))
    loop.loss_of = lambda out, y: F.cross_entropy(branch(out) if loop.step > 3 else out, y)
    loop.run()


@control
def frozen_with_gradients_of_zero() -> None:
    model = perceptron()
    loop = Loop(model, sets_to_none=False)
    loop.before_step = lambda step: model[0].requires_grad_(step < 4)
    loop.run()
