"""Mixed precision: autocast and the gradient scaler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import Loop, control, fault, nothing, perceptron, train


@fault(
    rule="mixed_precision", kind="clipped_before_unscale", severity="warning", step=0, names="clipped to 1"
)
def clipped_before_unscale(injected: bool) -> None:
    loop = Loop(perceptron(), clips="norm", has_scaler=True)
    if injected:
        loop.unscale = nothing
    loop.run()


@fault(rule="mixed_precision", kind="scaler_bypassed", severity="warning", step=0, names="AdamW")
def step_without_the_scaler(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = Loop(model, optimizer, has_scaler=True, clips="")
    if injected:
        loop.update = optimizer.step
    loop.run()


@control
def unscaled_by_hand() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = Loop(model, optimizer, has_scaler=True, clips="")

    def update() -> None:
        for parameter in model.parameters():
            parameter.grad /= loop.scaler.get_scale()
        optimizer.step()

    loop.update = update
    loop.run()


@control
def clipped_without_a_scale() -> None:
    """The scaler is there, and not enabled."""
    loop = Loop(perceptron(), clips="norm", has_scaler=False)
    loop.unscale = nothing
    loop.run()


def autocast(around_model: bool, around_loss: bool) -> None:
    """Train with the model, and the loss, inside of autocast or not."""
    model = perceptron()

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=around_model):
            return model(x)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=around_loss):
            return F.cross_entropy(out, y)

    train(forward, parts=(model,), loss_of=loss_of, autocast=False)


@fault(
    rule="mixed_precision",
    kind="autocast_without_effect",
    severity="warning",
    step=0,
    names="autocast (cpu, bfloat16)",
)
def autocast_around_the_loss_only(injected: bool) -> None:
    autocast(around_model=not injected, around_loss=True)


class Kept(nn.Module):
    """Leaves autocast for its layers."""

    def __init__(self, disabled: bool) -> None:
        super().__init__()
        self.disabled = disabled
        self.layers = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=not self.disabled and torch.is_autocast_enabled("cpu")):
            return self.layers(x)


@fault(
    rule="mixed_precision", kind="autocast_without_effect", severity="warning", step=0, names="all 2 products"
)
def autocast_disabled_inside_of_the_model(injected: bool) -> None:
    train(Kept(disabled=injected), autocast=True)


@control
def autocast_without_the_loss() -> None:
    autocast(around_model=True, around_loss=False)


@control
def frozen_encoder_under_autocast() -> None:
    """Its outputs are computed without gradients; what is trained stays in fp32."""
    encoded(perceptron().requires_grad_(False), nn.Linear(3, 3))


def encoded(body: nn.Module, head: nn.Module) -> None:
    """Train with a body under autocast and a head outside of it."""

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(x)
        return head(hidden.float())

    trained = [p for part in (body, head) for p in part.parameters() if p.requires_grad]
    train(forward, torch.optim.SGD(trained, lr=0.1), parts=(body, head), autocast=False)


@control
def head_in_single_precision() -> None:
    """The body is under autocast, and the head outside of it."""
    encoded(perceptron(), nn.Linear(3, 3))
