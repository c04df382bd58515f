"""Loss, learning rate and clip norm of every step equal what the script has, whatever is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import backlight
from backlight.findings.evaluate import evaluate_rules

pytestmark = pytest.mark.slow

STEPS = 120


class Training:
    """A model with batches of its own; ``logged`` is what the script would print of each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.logged: list[float] = []

    def loss(self, scale: float = 1.0) -> Tensor:
        return mse_loss(self.model(scale * torch.randn(8, 4)), torch.randn(8, 1))


def plain(training: Training) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    loss.backward()
    training.logged.append(loss.item())
    with torch.no_grad():
        loss.mul_(0.0)  # later changes are not of the step
    training.optimizer.step()


def accumulated(training: Training) -> None:
    parts = [training.loss() / 4 for _ in range(4)]
    for part in parts:
        part.backward()
    training.logged.append(sum(part.item() for part in parts))
    training.optimizer.step()
    training.optimizer.zero_grad()


def scaled(training: Training) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    training.scaler.scale(loss).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.logged.append(loss.item())


def with_closure(training: Training) -> None:
    if not training.logged:
        training.optimizer = torch.optim.LBFGS(training.model.parameters(), lr=0.01, max_iter=3)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = mse_loss(training.model(x), y)
        loss.backward()
        return loss

    training.logged.append(training.optimizer.step(closure).item())


def discarded(training: Training) -> None:
    training.loss().backward()  # its gradients are for another purpose
    plain(training)


@pytest.mark.parametrize("every", [1, 10**6], ids=["recorded", "not_recorded"])
@pytest.mark.parametrize("way", [plain, accumulated, scaled, with_closure, discarded])
def test_loss_is_that_of_the_script(way: Callable[[Training], None], every: int, tmp_path: Path) -> None:
    training = Training()
    optimizer = None if way is with_closure else training.optimizer
    with backlight.watch(training.model, optimizer, run=tmp_path / "run", every=every, summary=False):
        for _ in range(STEPS):
            way(training)
    loss = backlight.open_run(tmp_path / "run").scalar("loss")
    assert loss.steps.tolist() == list(range(STEPS))
    assert np.allclose(loss.values, training.logged, rtol=1e-6)


def in_two_parts(parameters: Iterable[Tensor], limit: float, **options: Any) -> Tensor:
    listed = list(parameters)
    norm = get_total_norm([p.grad for p in listed if p.grad is not None], **options)
    clip_grads_with_norm_(listed, limit, norm, **options)
    return norm


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, in_two_parts])
def test_rates_and_norms_are_those_of_the_script(
    clip: Callable[..., Tensor], options: dict[str, Any], tmp_path: Path
) -> None:
    training = Training()
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.99)
    norms, rates = [], []
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=50, summary=False):
        for _ in range(STEPS):
            training.optimizer.zero_grad()
            training.loss().backward()
            norms.append(clip(training.model.parameters(), 0.5, **options).item())
            rates.append(training.optimizer.param_groups[0]["lr"])
            training.optimizer.step()
            schedule.step()
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("clip/norm").values.tolist() == norms
    assert run.scalar("lr/0/0").values.tolist() == rates
    assert (run.coverage().taken, run.coverage().with_loss) == (STEPS, STEPS)
    assert 2 < run.coverage().with_gradients < STEPS


@pytest.mark.parametrize("is_divided", [True, False])
def test_sum_of_losses_that_nothing_divides_is_labelled(is_divided: bool, tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", summary=False):
        for _ in range(8):
            for _ in range(4):
                loss = training.loss()
                (loss / 4 if is_divided else loss).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    run = backlight.open_run(tmp_path / "run")
    assert run.loss_label() == ("loss" if is_divided else "sum of 4 losses")


def test_failed_backward_is_no_loss(tmp_path: Path) -> None:
    training = Training()
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=1000, summary=False):
        for _ in range(STEPS):
            loss = training.loss()
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            training.logged.append(loss.item())
            training.optimizer.step()
            training.optimizer.zero_grad()
    assert np.allclose(backlight.open_run(tmp_path / "run").scalar("loss").values, training.logged)


def test_bad_batch_in_a_step_that_is_not_recorded_is_found_at_its_step(tmp_path: Path) -> None:
    training = Training()
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=1e-3)
    with backlight.watch(training.model, training.optimizer, run=tmp_path / "run", every=50, summary=False):
        for step in range(STEPS):
            training.optimizer.zero_grad()
            training.loss(1e3 if step == 77 else 1.0).backward()
            training.optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    assert 77 not in run.series_steps("gradient")
    assert 77 in {finding.subject.step for finding in evaluate_rules(run) if finding.rule == "spike"}
