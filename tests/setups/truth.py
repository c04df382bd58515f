"""A training loop that records its own gradients and updates as reference for a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
from backlight.records import RunStatus
from backlight.store.read.run import Run

STEPS = 4
FEATURES, CLASSES = 32, 80


class Net(nn.Module):
    """A net whose last weight is large enough for 8-bit optimizer states."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.norm(self.first(x)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(6, FEATURES, generator=draw), torch.randint(CLASSES, (6,), generator=draw)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by their names without those of compiled wrappers."""
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def norms(tensors: dict[str, Tensor | None]) -> dict[str, float]:
    return {name: float(t.double().norm()) for name, t in tensors.items() if t is not None}


@dataclass
class Noted:
    """Reference values: norms of gradients and updates by step and parameter, and final weights."""

    gradients: list[dict[str, float]] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)


Backward = Callable[[nn.Module, Tensor, Tensor], None]


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    backward: Backward = backward,
    step: Callable[[], Any] | None = None,
) -> Noted:
    """Train; record the gradients before each step and its update."""
    noted = Noted()
    torch.manual_seed(3)
    for x, y in batches():
        optimizer.zero_grad()
        backward(model, x, y)
        before = {name: p.detach().clone().double() for name, p in parameters(model).items()}
        noted.gradients.append(norms({name: p.grad for name, p in parameters(model).items()}))
        (step or optimizer.step)()
        after = parameters(model)
        noted.updates.append(norms({name: after[name].detach().double() - w for name, w in before.items()}))
    noted.ends = [p.detach().clone() for p in parameters(model).values()]
    return noted


def watched(run: Callable[[], Noted], path: Path, **settings: Any) -> tuple[Noted, Run]:
    """Train unwatched and watched; assert equal weights and norms.

    Updates are compared where they are measured: a parameter that no optimizer holds has none.
    """
    alone = run()
    with backlight.watch(run=path, every=1, health={"exact_updates": 1}, **settings):
        noted = run()
    check(alone, noted, path)
    return noted, backlight.open_run(path)


def check(alone: Noted, noted: Noted, path: Path) -> None:
    """Assert that the watched run equals the unwatched one and that its norms equal the reference."""
    assert all(torch.equal(one, other) for one, other in zip(alone.ends, noted.ends, strict=True))
    stored = backlight.open_run(path)
    assert stored.status is RunStatus.FINISHED
    gradients, updates = stored.frame("gradient", "norm"), stored.frame("update", "update_norm")
    assert list(gradients.steps) == list(updates.steps) == list(range(STEPS))
    assert gradients.measured.all()
    wanted = [[step[name] for name in gradients.names] for step in noted.gradients]
    np.testing.assert_allclose(gradients.values, wanted, rtol=1e-6)
    moved = np.array([[step[name] for name in updates.names] for step in noted.updates])
    measured = updates.measured
    assert measured.any()
    np.testing.assert_allclose(updates.values[measured], moved[measured], rtol=1e-5, atol=1e-12)
    assert (moved[~measured] == 0).all()
