"""Watched training of small models, and what was measured of their layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.activations.model.layers import MeasuredLayer, measured_layers
from backlight.records import Finding
from backlight.store.read.run import Run
from backlight.store.write.writer import RunWriter

Loss = Callable[[nn.Module, Tensor], Tensor]


def write_activations(writer: RunWriter) -> None:
    """Write what the monitor records of two layers with a ReLU between them, nearly all of it dead."""
    kinds = {"fc1": "Linear", "relu": "ReLU", "fc2": "Linear"}
    shared = {"model": "", "size": 4096, "units": 64, "hidden": True, "line": "train.py:12"}
    layers = [
        {"name": name, "kind": kind, "parameters": kind == "Linear", "input": "fc1" if name == "relu" else ""}
        for name, kind in kinds.items()
    ]
    writer.event(0, "activation_layers", {"layers": [layer | shared for layer in layers]})
    for step in (0, 1, 2, 4, 8, 16, 32):
        writer.scalars(step, {f"activations/rms/{name}": 0.5 for name in kinds})
        if step >= 4:
            writer.scalar(step, "activations/dead/relu", 63 / 64)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of a regression on the sum of the inputs."""
    return (model(x).flatten(1).mean(1) - x.flatten(1).sum(1)).square().mean()


def watched(path: Path, train: Callable[[], object], **settings: Any) -> Run:
    """Return the run of a training loop of which every step is measured."""
    torch.manual_seed(0)
    options = {"every": 1, **settings}
    with backlight.watch(run=path, monitors=("activations",), activations=options, quiet=True):
        train()
    return backlight.open_run(path)


def fit(
    model: nn.Module,
    shape: tuple[int, ...] = (64, 8),
    *,
    steps: int = 6,
    lr: float = 1e-3,
    loss: Loss = squared,
) -> None:
    """Train a model on random inputs with SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, torch.randn(shape)).backward()
        optimizer.step()


def by_name(run: Run) -> dict[str, MeasuredLayer]:
    """Return the measured layers of a run."""
    return {layer.name: layer for layer in measured_layers(run)}


def reported(run: Run) -> list[Finding]:
    """Return the findings of the rule."""
    return [finding for finding in evaluate_rules(run) if finding.rule == "activations"]
