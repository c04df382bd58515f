"""What a step did is counted: forwards of the model under grad, and values that the losses add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.capture.hub import HUB
from backlight.findings.evaluate import evaluate_rules
from backlight.findings.recorded_steps import work_of
from backlight.monitors.health.rules import spike
from backlight.records import Finding

pytestmark = pytest.mark.slow

LENGTHS = [3, 40, 5, 90, 4, 7, 60, 3]
"""Rounds of a step; some steps have twenty times those of others."""


def trained(
    path: Path, loss: Callable[[nn.Module, int], Tensor | None], *, every: int = 1, steps: int = 8
) -> backlight.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # only what a step does varies
    with backlight.watch(model, optimizer, run=path, every=every):
        for step in range(steps):
            optimizer.zero_grad()
            total = loss(model, step)
            if total is not None:
                total.backward()
            optimizer.step()
    return backlight.open_run(path)


def rounds_of(step: int) -> int:
    return LENGTHS[step % len(LENGTHS)]


def one_by_one(model: nn.Module, step: int) -> Tensor:
    """Add up one loss per forward, as an episode or a cell per token does."""
    return torch.stack([model(torch.randn(1, 4)).square().sum() for _ in range(rounds_of(step))]).sum()


def microbatches(model: nn.Module, step: int) -> None:
    for _ in range(rounds_of(step)):
        model(torch.randn(2, 4)).square().mean().backward()


def whole_batch(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(rounds_of(step), 4)).square().sum()


def with_evaluation(model: nn.Module, step: int) -> Tensor:
    with torch.no_grad():
        model(torch.randn(2, 4))
    return model(torch.randn(2, 4)).square().mean()


@pytest.mark.parametrize(
    ("loss", "forwards", "addends"),
    [
        (one_by_one, LENGTHS, LENGTHS),
        (microbatches, LENGTHS, LENGTHS),
        (whole_batch, [1] * 8, LENGTHS),
        (with_evaluation, [1] * 8, [1] * 8),
    ],
)
def test_work_is_recorded(
    tmp_path: Path, loss: Callable[[nn.Module, int], Tensor | None], forwards: list[int], addends: list[int]
) -> None:
    run = trained(tmp_path / "run", loss)
    assert run.scalar("forwards").values.tolist() == forwards
    assert run.scalar("addends").values.tolist() == addends


def test_unrecorded_steps_add_nothing_to_recorded_ones(tmp_path: Path) -> None:
    counted = []

    def loss(model: nn.Module, step: int) -> Tensor:
        counted.append(HUB.unrecorded is not None)
        return one_by_one(model, step)

    run = trained(tmp_path / "run", loss, every=10, steps=60)
    assert sum(counted) > 20
    recorded = run.scalar("forwards")
    assert recorded.values.tolist() == [rounds_of(int(step)) for step in recorded.steps]


KINDS = ("episodes", "microbatches", "batches")


def run_of(path: Path, kind: str, damaged: int | None) -> list[Finding]:
    """Train with steps of 5 or 6 rounds and a few of 60; return what leaps."""
    lengths = [5, 6] * 45
    for long in (45, 62, 63, 64, 80):
        lengths[long] = 60

    def loss(model: nn.Module, step: int) -> Tensor | None:
        scale = 100.0 if step == damaged else 1.0
        batch = scale * (1 + 0.1 * torch.randn(lengths[step], 4))
        if kind == "batches":
            return model(batch).square().sum()
        if kind == "episodes":
            return torch.stack([model(row[None]).square().sum() for row in batch]).sum()
        for row in batch:
            model(row[None]).square().mean().backward()
        return None

    run = trained(path, loss, steps=90)
    assert work_of(run, run.scalar("loss").steps).max() >= 10
    return [one for one in evaluate_rules(run) if one.rule in {"spike", "exploding"}]


@pytest.mark.parametrize("kind", KINDS)
def test_long_step_is_no_spike_and_damage_is_one(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_of(tmp_path / "healthy", kind, None) == []
    with monkeypatch.context() as patch:
        patch.setattr(spike, "work_of", lambda _, steps: np.ones(len(steps)))
        assert run_of(tmp_path / "uncounted", kind, None)
    (finding,) = run_of(tmp_path / "damaged", kind, 70)
    assert (finding.rule, finding.subject.step) == ("spike", 70)
    count = "addends" if kind == "batches" else "forwards"
    assert f"scalars/{count}" in [one.path for one in finding.evidence]
