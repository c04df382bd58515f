"""The gradients of the last step are recorded where the script has left them, whatever is sampled."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import backlight
from backlight.store.read.run import Run, open_run

pytestmark = pytest.mark.slow

STEPS, EVERY = 150, 64
Loop = Callable[["Training"], None]


class Training:
    """A regression; ``norms`` are the total norms of the gradients that each backward gave."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), **({"lr": 0.01} | options))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.norms: list[float] = []

    def loss(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.randn(16, 4) if x is None else x
        return mse_loss(self.model(x), x.sum(1, keepdim=True))

    def backward(self, x: torch.Tensor | None = None) -> None:
        self.loss(x).backward()
        squares = [float(p.grad.double().square().sum()) for p in self.model.parameters()]
        self.norms.append(sum(squares) ** 0.5)


def cleared_first(training: Training) -> None:
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        training.backward()
        training.optimizer.step()


def evaluated_after(training: Training) -> None:
    cleared_first(training)
    with torch.no_grad():
        training.loss()


def clipped(training: Training, limit: float = 0.05) -> None:
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        training.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), limit)
        training.optimizer.step()


def hardly_clipped(training: Training) -> None:
    clipped(training, 1e6)


def loaded(training: Training) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16 * STEPS, 4)), batch_size=16)
    for (x,) in loader:
        training.optimizer.zero_grad()
        training.backward(x)
        training.optimizer.step()


def by_closure(training: Training) -> None:
    """Take steps as Lightning does: forward, clearing and backward are in a closure."""

    def closure() -> None:
        training.optimizer.zero_grad()
        training.backward()

    for _ in range(STEPS):
        training.optimizer.step(closure)


def cleared_last(training: Training, *, set_to_none: bool = True) -> None:
    """Clear as the Trainer of Hugging Face does."""
    for _ in range(STEPS):
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=set_to_none)


def zeroed_last(training: Training) -> None:
    cleared_last(training, set_to_none=False)


def clipped_in_part(training: Training) -> None:
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        training.backward()
        nn.utils.clip_grad_norm_(training.model[0].parameters(), 0.05)
        training.optimizer.step()


def clipped_by_another_norm(training: Training) -> None:
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        training.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.01, norm_type=float("inf"))
        training.optimizer.step()


def scaled(training: Training) -> None:
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        training.scaler.scale(training.loss()).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()


def a_step_begun(training: Training) -> None:
    cleared_first(training)
    training.loss().backward()


def watched(path: Path, training: Training, loop: Loop) -> Run:
    with backlight.watch(training.model, training.optimizer, run=path, every=EVERY, summary=False):
        loop(training)
    return open_run(path)


@pytest.mark.parametrize(
    "loop", [cleared_first, evaluated_after, clipped, hardly_clipped, loaded, by_closure]
)
def test_what_the_last_step_left_is_recorded(tmp_path: Path, loop: Loop) -> None:
    training = Training()
    run = watched(tmp_path / "run", training, loop)
    steps = [*range(0, STEPS, EVERY), STEPS - 1]
    assert run.series_steps("gradient").tolist() == steps
    norm = run.scalar("total_norm")
    assert norm.steps.tolist() == steps
    assert np.allclose(norm.values, [training.norms[step] for step in steps], rtol=2e-5)
    assert run.losses == ()


@pytest.mark.parametrize(
    "loop", [cleared_last, zeroed_last, clipped_in_part, clipped_by_another_norm, scaled, a_step_begun]
)
def test_what_is_no_gradient_of_the_last_step_is_not_recorded(tmp_path: Path, loop: Loop) -> None:
    run = watched(tmp_path / "run", Training(), loop)
    assert run.series_steps("gradient").tolist() == [*range(0, STEPS, EVERY)]


def test_an_optimizer_that_changes_gradients_is_noticed(tmp_path: Path) -> None:
    training = Training(momentum=0.9, nesterov=True, foreach=True)
    run = watched(tmp_path / "run", training, cleared_first)
    assert run.series_steps("gradient").tolist() == [*range(0, STEPS, EVERY)]


def test_a_last_step_that_is_recorded_is_recorded_once(tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=1, summary=False):
        for _ in range(20):
            training.optimizer.zero_grad()
            training.backward()
            training.optimizer.step()
    run = open_run(tmp_path / "run")
    assert run.series_steps("gradient").tolist() == list(range(20))


FREED = """
import sys
import torch
from torch import nn

class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)

def main(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if kind == "wrapped":
        model = Wrapper(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(700):
        x = torch.randn(16, 4)
        if kind == "wrapped anew":
            Wrapper(model)(x).square().mean()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    if kind == "deleted":
        del model
    return float(sum(p.grad.double().square().sum() for p in optimizer.param_groups[0]["params"])) ** .5

print(repr([main(sys.argv[1]) for _ in range(int(sys.argv[2]))]))
"""


@pytest.mark.parametrize(
    ("kind", "models"),
    [
        *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in ("plain", "wrapped")),
        ("deleted", 1),
        ("wrapped anew", 1),
        ("plain", 3),
    ],
)
def test_what_is_left_in_a_freed_model_is_recorded(
    tmp_path: Path, console_script: Callable[..., Any], kind: str, models: int
) -> None:
    (tmp_path / "freed.py").write_text(FREED)
    done = console_script(tmp_path, "run", "--every", EVERY, "--out", "run", "freed.py", kind, models)
    norms = ast.literal_eval(done.stdout.splitlines()[0])
    run = open_run(tmp_path / "run")
    total = run.scalar("total_norm")
    recorded = dict(zip(total.steps.tolist(), total.values.tolist(), strict=True))
    lasts = [700 * (number + 1) - 1 for number in range(models)]
    assert [recorded[step] for step in lasts] == pytest.approx(norms, rel=1e-5)
    if kind == "wrapped anew":  # each of 700 wrappers is freed
        assert len(set(recorded) - set(range(0, 700, EVERY))) <= 700 // 16
