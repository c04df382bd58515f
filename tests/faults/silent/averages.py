"""Averages of weights that are evaluated without the statistics, updates or vectors that they need."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from faults.silent.loop import EVALUATION_STEPS, Loop, batches, control, fault, perceptron

STEPS = 4 * EVALUATION_STEPS
FIRST = EVALUATION_STEPS - 1

Update = Callable[[], object]


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def bounded() -> nn.Sequential:
    return nn.Sequential(spectral_norm(nn.Linear(4, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 3)))


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in batches(2):
            model(x)
    model.train()


def averaged(model: nn.Module, average: nn.Module, update: Update, prepare: Update = lambda: None) -> None:
    """Train a model, update an average after each step, prepare and evaluate it now and then."""
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=STEPS, averages=False)

    def follow(step: int) -> None:
        update()
        if step % EVALUATION_STEPS == FIRST:
            prepare()
            evaluate(average)

    loop.after_step = follow
    loop.run()


def lerp(average: nn.Module, model: nn.Module, buffers: Callable[[Tensor, Tensor], object]) -> None:
    """Move the parameters of an average towards those of a model."""
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 0.1)
        for mean, value in zip(average.buffers(), model.buffers(), strict=True):
            buffers(mean, value)


def nothing(mean: Tensor, value: Tensor) -> None:
    """Leave a buffer as it is."""


class Shadow(nn.Module):
    """A module that holds an average of parameters, and perhaps the buffers."""

    def __init__(self, model: nn.Module, has_buffers: bool) -> None:
        super().__init__()
        self.module, self.has_buffers = copy.deepcopy(model), has_buffers

    def update(self, model: nn.Module) -> None:
        state = model.state_dict() if self.has_buffers else dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                if name in state:
                    value.copy_(0.9 * value + 0.1 * state[name])


@fault(rule="module_modes", kind="average_statistics", severity="warning", step=8, names="Shadow")
def average_without_statistics(injected: bool) -> None:
    model = normed()
    average = Shadow(model, not injected)
    averaged(model, average.module, lambda: average.update(model))


@control
def average_that_copies_the_buffers() -> None:
    model = normed()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged(model, average, lambda: average.update_parameters(model))


@fault(rule="module_modes", kind="average_statistics", severity="warning", step=12, names="Sequential")
def copy_of_parameters_without_statistics(injected: bool) -> None:
    model = normed()
    average = copy.deepcopy(model).requires_grad_(False)
    buffers = nothing if injected else lambda mean, value: mean.copy_(value)
    averaged(model, average, lambda: lerp(average, model, buffers))


@control
def statistics_of_an_average_estimated_before_its_evaluation() -> None:
    model = normed()
    average = AveragedModel(model)
    averaged(
        model,
        average,
        lambda: average.update_parameters(model),
        lambda: update_bn([next(batches(1))[0]], average),
    )


@control
def average_evaluated_in_training_mode() -> None:
    """Its norms use the statistics of the batch."""
    model = normed()
    average = AveragedModel(model)
    loop = Loop(model, steps=STEPS, averages=False)

    def follow(step: int) -> None:
        average.update_parameters(model)
        with torch.no_grad():
            average(next(batches(1))[0])

    loop.after_step = follow
    loop.run()


@control
def frozen_copy_as_a_random_target() -> None:
    """What a copy that nothing changes computes is the target of the model that is trained."""
    model, target = normed(), normed().requires_grad_(False).eval()
    loop = Loop(model, loss_of=lambda y, _: y.square().mean(), steps=STEPS)
    loop.after_step = lambda _: evaluate(target)
    loop.run()


@control
def average_of_layer_norms() -> None:
    model = perceptron(nn.LayerNorm(3))
    average = AveragedModel(model)
    averaged(model, average, lambda: average.update_parameters(model))


@fault(rule="weights_unchanged", kind="average", severity="warning", step=4, names="AveragedModel")
def average_never_updated(injected: bool) -> None:
    model = perceptron()
    average = AveragedModel(model)
    averaged(model, average, lambda: None if injected else average.update_parameters(model))


@control
def average_that_begins_late() -> None:
    model = perceptron()
    average, steps = AveragedModel(model), iter(range(STEPS))
    averaged(model, average, lambda: average.update_parameters(model) if next(steps) > STEPS // 2 else None)


@control
def average_that_is_written_by_hand() -> None:
    model = perceptron()
    average = AveragedModel(model)
    averaged(model, average, lambda: lerp(average.module, model, nothing))


@control
def average_of_the_last_weights_alone() -> None:
    """One evaluation at the end, of an average that was not used."""
    model = perceptron()
    average = AveragedModel(model)
    Loop(model, steps=STEPS, averages=False).run()
    evaluate(average)


@fault(rule="module_modes", kind="spectral_vector", severity="warning", step=8, names="length 1")
def mean_of_unit_vectors(injected: bool) -> None:
    model = bounded()
    average = copy.deepcopy(model).requires_grad_(False)

    def buffers(mean: Tensor, value: Tensor) -> None:
        if injected:
            mean.lerp_(torch.nn.functional.normalize(torch.randn_like(value), dim=0), 0.2)
        else:
            mean.copy_(value)

    averaged(model, average, lambda: lerp(average, model, buffers))


@control
def vectors_of_an_average_from_its_first_step() -> None:
    """The power iteration of the average runs in training mode before each evaluation."""
    model = bounded()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def prepare() -> None:
        average.train()
        with torch.no_grad():
            average(next(batches(1))[0])

    averaged(model, average, lambda: average.update_parameters(model), prepare)
