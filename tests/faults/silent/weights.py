"""Weights that change outside of the optimizer, or do not change in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import Loop, batches, control, fault, perceptron, train


def averaged(update: Callable[[nn.Module, nn.Module, int], None]) -> None:
    """Train a model with a copy of it; ``update(model, copy, step)`` follows each step."""
    model = perceptron()
    average = copy.deepcopy(model).requires_grad_(False)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loop.after_update = torch.no_grad()(lambda step: update(model, average, step))
    loop.run()


def follow(model: nn.Module, average: nn.Module, weight: float) -> None:
    for own, mean in zip(model.parameters(), average.parameters(), strict=True):
        mean.lerp_(own, weight)


@fault(rule="weights_changed", severity="error", step=0, names="`0.bias`")
def average_copied_into_the_model(injected: bool) -> None:
    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        follow(model, average, 0.01)
        if injected:
            for own, mean in zip(model.parameters(), average.parameters(), strict=True):
                own.data = mean.data.clone()

    averaged(update)


@fault(rule="weights_changed", severity="error", step=0, kind="step", also="undone", names="`0.bias`")
def state_restored_at_every_step(injected: bool) -> None:
    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        if injected:
            model.load_state_dict(average.state_dict())

    averaged(update)


@fault(rule="weights_changed", severity="warning", step=1, names="`0.weight`")
def weights_edited_before_backward(injected: bool) -> None:
    model = perceptron()

    def edit(_: int) -> None:
        model[0].weight.data += 0.01 * torch.randn(16, 4)

    loop = Loop(model)
    if injected:
        loop.before_backward = edit
    loop.run()


@fault(rule="weights_changed", severity="info", step=0, names="`0.weight`")
def noise_on_the_weights(injected: bool) -> None:
    """As in Langevin dynamics: worth knowing, and no error."""

    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        if injected:
            for own in model.parameters():
                own.add_(1e-3 * torch.randn_like(own))

    averaged(update)


@fault(rule="weights_changed", severity="info", step=1, names="`0.bias`")
def slow_weights(injected: bool) -> None:
    """Lookahead by hand: at every second step here, the weights go back half of their way."""

    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        if injected and step % 2:
            follow(model, average, 0.5)
            model.load_state_dict(average.state_dict())

    averaged(update)


@control
def targets_with_an_optimizer_that_never_steps() -> None:
    """Each network of an agent makes its optimizer when it is built; targets follow the trained one."""
    model, target = perceptron(), perceptron()
    target.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, target)]
    for x, _ in batches():
        with torch.no_grad():
            goal = 1.0 + 0.9 * target(x).amax(1)
        optimizers[0].zero_grad()
        F.smooth_l1_loss(model(x)[:, 0], goal).backward()
        optimizers[0].step()
        for own, mean in zip(model.parameters(), target.parameters(), strict=True):
            mean.data.copy_(0.9 * mean.data + 0.1 * own.data)


@control
def clipped_weights() -> None:
    """A Wasserstein critic, whose weights are clipped."""
    averaged(lambda model, *_: [own.clamp_(-0.2, 0.2) for own in model.parameters()])


@control
def rescaled_weights() -> None:
    averaged(lambda model, *_: [own.mul_(0.99) for own in model.parameters()])


@control
def pruned_weights() -> None:
    averaged(lambda model, *_: [own.mul_(own.abs() > 0.1) for own in model.parameters()])


@control
def two_optimizers() -> None:
    model = perceptron()
    train(model, *(torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)))


@control
def weights_of_the_average_for_an_evaluation() -> None:
    def update(model: nn.Module, average: nn.Module, step: int) -> None:
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        model(torch.randn(8, 4))
        model.load_state_dict(own)

    averaged(update)


@fault(rule="weights_unchanged", kind="rounded", severity="error", step=0, names="`0.weight`")
def rate_below_the_spacing(injected: bool) -> None:
    model = perceptron()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-10 if injected else 1e-5))


@fault(rule="weights_unchanged", kind="rounded", severity="error", step=0, names="`0.weight`")
def weights_in_bfloat16(injected: bool) -> None:
    model = perceptron().bfloat16()
    train(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-5 if injected else 1e-2),
        loss_of=lambda out, y: F.cross_entropy(out.float(), y),
        data=lambda count: [(x.bfloat16(), y) for x, y in batches(count)],
        autocast=False,
    )


@control
def unused_rows_of_an_embedding() -> None:
    """Weights without a gradient stay as they are."""
    model = nn.Sequential(nn.EmbeddingBag(500, 16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(
        model, optimizer, data=lambda count: [(torch.randint(0, 500, (8, 4)), y) for _, y in batches(count)]
    )


@control
def warm_up_from_zero() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (step - 4) / 10))
    loop = Loop(model, optimizer, has_schedule=False)
    loop.after_update = lambda _: schedule.step()
    loop.run()


@control
def weights_become_nan() -> None:
    """A weight that is NaN differs from itself, and no step with a finite gradient changes it."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, _) in enumerate(batches()):
        optimizer.zero_grad()
        (model(x).sum() * (float("nan") if step == 1 else 1.0)).backward()
        optimizer.step()
    assert model.weight.isnan().all()


class Copying(torch.optim.Optimizer):
    """Gradient descent that may update a copy of the weight."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, in_place: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.in_place = in_place

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                updated = parameter if self.in_place else parameter.clone()
                updated -= group["lr"] * parameter.grad


@fault(rule="weights_unchanged", kind="no_effect", severity="error", step=0, names="0.weight")
def step_that_updates_a_copy(injected: bool) -> None:
    model = perceptron()
    train(model, Copying(model.parameters(), lr=0.1, in_place=not injected))


@control
def group_with_rate_zero() -> None:
    """Most weights are in a group that waits."""
    model = perceptron()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    train(model, torch.optim.SGD(groups, lr=0.1))


@control
def step_at_every_fourth_gradient() -> None:
    """An optimizer that collects gradients itself."""

    class Collecting(Copying):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls += 1
            if self.calls % 4 == 0:
                super().step()

    model = perceptron()
    train(model, Collecting(model.parameters(), lr=0.1, in_place=True))
