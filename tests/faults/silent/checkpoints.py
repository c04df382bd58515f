"""Checkpoints of which the training run does not begin with everything."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from faults.silent.loop import batches, control, fault, perceptron


def checkpoint() -> Any:
    """Return what ``torch.load`` gives of a run with Adam."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3).state_dict()
    for number, parameter in enumerate(model.parameters()):
        moments = {"exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
        optimizer["state"][number] = {"step": torch.tensor(5.0), **moments}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer, "epoch": 1}, file)
    file.seek(0)
    return torch.load(file)


def resumed(lr: float = 1e-3) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """Return a checkpoint, a new model with its weights, and a new optimizer."""
    state, model = checkpoint(), perceptron()
    model.load_state_dict(state["model"])
    return state, model, torch.optim.Adam(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)


@fault(rule="not_restored", kind="optimizer_state", severity="warning", step=0)
def optimizer_state_not_restored(injected: bool) -> None:
    state, model, optimizer = resumed()
    if not injected:
        optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer)


@fault(rule="not_restored", kind="overwritten", severity="warning", step=0)
def initialised_after_loading(injected: bool) -> None:
    model = perceptron()
    if not injected:
        initialise(model)
    model.load_state_dict(checkpoint()["model"])
    if injected:
        initialise(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@fault(rule="not_restored", kind="nothing_loaded", severity="error", step=0)
def keys_with_a_prefix(injected: bool) -> None:
    model = perceptron()
    state = {f"module.{key}" if injected else key: one for key, one in checkpoint()["model"].items()}
    model.load_state_dict(state, strict=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def fine_tuned_with_other_settings() -> None:
    _, model, optimizer = resumed(lr=1e-4)
    train(model, optimizer)


@control
def new_head_on_loaded_weights() -> None:
    """The head of another size is initialised, and so is its optimizer."""
    body = checkpoint()["model"]
    model = perceptron(nn.ReLU(), nn.Linear(3, 5))
    model.load_state_dict(body, strict=False)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-3))


@control
def last_layer_initialised_again() -> None:
    model = perceptron()
    model.load_state_dict(checkpoint()["model"])
    model[2].reset_parameters()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def shrunk_and_perturbed() -> None:
    model = perceptron()
    model.load_state_dict(checkpoint()["model"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.02 * torch.randn_like(parameter))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def best_weights_loaded_in_between() -> None:
    """The optimizer goes on with the state that it has."""
    state, model, optimizer = resumed(lr=2e-3)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3
    model.load_state_dict(state["model"])
    train(model, optimizer)
