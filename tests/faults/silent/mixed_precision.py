"""Mixed precision: autocast and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import batches, control, fault, perceptron


@fault(
    rule="mixed_precision", kind="clipped_before_unscale", severity="warning", step=0, names="clipped to 1"
)
def clipped_before_unscale(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if not injected:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def scaled_steps(step: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], object]) -> None:
    """Train with a scaled loss; ``step(scaler, optimizer)`` follows each backward."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        step(scaler, optimizer)


@fault(rule="mixed_precision", kind="scaler_bypassed", severity="warning", step=0, names="AdamW")
def step_without_the_scaler(injected: bool) -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if injected:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    scaled_steps(step)


@control
def unscaled_by_hand() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= scaler.get_scale()
        optimizer.step()

    scaled_steps(step)


@control
def clipped_without_a_scale() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def autocast(around_model: bool, around_loss: bool) -> None:
    """Train with the model, and the loss, inside of autocast or not."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=around_model):
            out = model(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=around_loss):
            loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()


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
    model = Kept(disabled=injected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@control
def autocast_without_the_loss() -> None:
    autocast(around_model=True, around_loss=False)


@control
def frozen_encoder_under_autocast() -> None:
    """Its outputs are computed without gradients; what is trained stays in fp32."""
    encoder, model = perceptron().requires_grad_(False), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = encoder(x)
        F.cross_entropy(model(hidden.float()), y).backward()
        optimizer.step()


@control
def head_in_single_precision() -> None:
    """The body is under autocast, and the head outside of it."""
    body, head = perceptron(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(x)
        F.cross_entropy(head(hidden.float()), y).backward()
        optimizer.step()
