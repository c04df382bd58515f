"""Well-known errors that other monitors than ``correctness`` find as well, each with its fixed control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.injection import Fault, registrar
from faults.silent.loop import Loop, batches, perceptron, train

FAULTS: dict[str, Fault] = {}
"""Errors that the default monitors find together."""

fault = registrar(FAULTS)

STEPS = 30


class Classifier(nn.Module):
    """An encoder and a head; ``between`` is applied to what goes from one to the other."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.encoder(x)).relu())


# Parameters without a gradient, or without an optimizer


@fault(rule="no_gradient", severity="warning", names="Only `head.bias` is trained")
def all_but_a_bias_frozen(injected: bool) -> None:
    """A prefix that does not match what it is meant to spare."""
    model = Classifier()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("head.bias" if injected else "head")
    train(model)


@fault(rule="no_gradient", severity="warning", names="encoder.weight")
def encoder_is_detached(injected: bool) -> None:
    train(Classifier(Tensor.detach if injected else Tensor.contiguous), steps=STEPS)


class Checkpointed(Classifier):
    """Computes its encoder again in backward; with re-entrant checkpointing, of an input without gradient."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.encoder, x, use_reentrant=self.is_reentrant).relu())


@fault(rule="no_gradient", severity="warning", names="encoder.weight")
def checkpoint_of_an_input_without_gradient(injected: bool) -> None:
    model = Checkpointed()
    model.is_reentrant = injected
    train(model, steps=STEPS, is_compiled=False)  # which is never re-entrant


@fault(rule="trained_tensors", severity="error", names="encoder.weight")
def encoder_is_left_out_of_the_optimizer(injected: bool) -> None:
    model = Classifier()
    train(model, torch.optim.AdamW((model.head if injected else model).parameters(), lr=1e-3), steps=STEPS)


@fault(rule="trained_tensors", severity="error", names="head.weight")
def head_replaced_after_the_optimizer_was_made(injected: bool) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if injected:
        model.head = nn.Linear(16, 3)
    train(model, optimizer, steps=STEPS)


@fault(rule="no_gradient", severity="error", names="`requires_grad` was set on the loss itself")
def loss_of_a_threshold(injected: bool) -> None:
    """Backward would raise, were it not for ``requires_grad_`` on the loss."""

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        wanted = F.one_hot(y, 3).float()
        predicted = (out.sigmoid() > 0.5).float() if injected else out.sigmoid()
        loss = F.mse_loss(predicted, wanted)
        return loss.requires_grad_() if injected else loss

    train(perceptron(), loss_of=loss_of, steps=STEPS, has_scaler=False, clips="", autocast=False)


@fault(rule="no_gradient", severity="warning", names="encoder.weight")
def encoder_is_detached_in_a_short_run(injected: bool) -> None:
    train(Classifier(Tensor.detach if injected else Tensor.contiguous), steps=4)


# Gradients that are zero, or not finite


@fault(rule="no_gradient", severity="warning", names="input of `head` is zero")
def all_weights_start_at_zero(injected: bool) -> None:
    model = Classifier()
    if injected:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    train(model, steps=STEPS)


@fault(rule="no_gradient", severity="warning", names="input of `head` is zero")
def no_unit_is_active(injected: bool) -> None:
    model = Classifier()
    nn.init.constant_(model.encoder.bias, -100.0 if injected else 0.0)
    train(model, steps=STEPS)


@fault(rule="non_finite", severity="error", names="head.bias")
def distance_of_equal_points(injected: bool) -> None:
    """The derivative of a square root at 0 is infinite."""
    model = Classifier()

    def forward(x: Tensor) -> Tensor:
        other = x.clone()
        other[4:] += 1.0
        squares = (model(x) - model(other)).square().sum(dim=1)
        return (squares if injected else squares + 1e-6).sqrt()

    train(
        forward,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss_of=lambda out, _: out.mean(),
        parts=(model,),
        steps=STEPS,
        has_scaler=False,  # which skips each step that is not finite, as the well-behaved one here
        clips="",
    )


@fault(rule="vanishing", severity="warning", names=".weight", also=("weights_unchanged",))
def many_sigmoid_layers(injected: bool) -> None:
    between = nn.Sigmoid if injected else nn.ReLU
    layers = [layer for _ in range(14) for layer in (nn.Linear(16, 16), between())]
    for layer in layers[::2]:
        if isinstance(layer, nn.Linear) and not injected:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    train(nn.Sequential(nn.Linear(4, 16), *layers, nn.Linear(16, 3)), steps=100)


@fault(rule="loss_scale", severity="warning", names="underflow", also=("weights_unchanged",))
def half_precision_without_a_scale(injected: bool) -> None:
    """Gradients of fp16 below 6e-8 are zero."""
    model = Classifier().half()
    factor = 2.0**-20 if injected else 1.0
    train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss_of=lambda out, y: F.cross_entropy(out.float(), y) * factor,
        data=lambda count: ((x.half(), y) for x, y in batches(count)),
        steps=STEPS,
        autocast=False,
        has_scaler=False,
    )


# Size of the updates


@fault(rule="large_update", severity="error", names="head.weight")
def learning_rate_too_large(injected: bool) -> None:
    model = Classifier()
    train(model, torch.optim.AdamW(model.parameters(), lr=3.0 if injected else 1e-3), steps=120)


@fault(rule="always_clipped", severity="warning", names="1e-05")
def clipped_to_almost_nothing(injected: bool) -> None:
    model = Classifier()
    loop = Loop(model, steps=120, clips="")

    def clip(_: int) -> None:
        loop.unscale()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5 if injected else 10.0)

    loop.before_update = clip
    loop.run()


def train_at_the_limit(injected: bool, **habits: Any) -> None:
    """Train with gradients near the largest number of fp32."""
    factor = 1e38 if injected else 1.0
    loss_of = lambda out, y: F.cross_entropy(out, y) * factor  # noqa: E731
    train(Classifier(), loss_of=loss_of, steps=120, autocast=False, **habits)


@fault(rule="loss_scale", severity="error", names="skipped")
def scaler_skips_every_step(injected: bool) -> None:
    # Half of it, as of two microbatches, the scale can make up for.
    train_at_the_limit(injected, has_scaler=True, clips="", microbatches=1)


@fault(
    rule="always_clipped", severity="error", names="every gradient to zero", also=("no_update", "exploding")
)
def clipped_by_a_norm_that_overflows(injected: bool) -> None:
    """Each gradient is finite, and their norm is not: 1 / inf is 0."""
    train_at_the_limit(injected, has_scaler=False, clips="norm")


# Order of calls


@fault(rule="gradients_not_cleared", severity="warning", names="SGD takes two steps")
def two_steps_of_one_gradient(injected: bool) -> None:
    loop = Loop(perceptron(), steps=STEPS, has_scaler=False)  # a scaler refuses the second one
    if injected:
        loop.after_update = lambda _: loop.update()
    loop.run()


@fault(rule="gradients_not_cleared", severity="warning", names="propagated back twice")
def loss_propagated_back_twice(injected: bool) -> None:
    loop = Loop(perceptron(), steps=STEPS)

    def backward(loss: Tensor) -> None:
        scaled = loop.scaler.scale(loss)
        scaled.backward(retain_graph=injected)
        if injected:
            scaled.backward()

    loop.backward = backward
    loop.run()


@fault(rule="loss_input", severity="error", names="dimension 0")
def softmax_over_the_batch(injected: bool) -> None:
    dim = 0 if injected else 1
    train(perceptron(), loss_of=lambda out, y: F.nll_loss(F.log_softmax(out, dim=dim), y), steps=STEPS)
