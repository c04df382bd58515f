"""Mixed precision: autocast and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from faults.silent.loop import batches, control, fault, perceptron


@fault(rule="clipped_before_unscale", severity="warning", step=0)
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


@fault(rule="scaler_bypassed", severity="warning", step=0)
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
