"""Losses at chance, losses that rise, and healthy losses that come close to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding
from faults.silent.loop import perceptron
from run_builder import build_run


def evaluated(
    path: Path,
    losses: Sequence[float],
    classes: int | None,
    factor: float = 1.0,
    steps: Sequence[int] = range(0, 1200, 10),
) -> list[Finding]:
    events = [] if classes is None else [(0, "classes", {"classes": classes, "factor": factor})]
    scalars = {"loss": dict(zip(steps, losses, strict=False))}
    return list(evaluate_rules(build_run(path, monitors=("correctness",), events=events, scalars=scalars)))


def noise(count: int, size: float = 0.01) -> np.ndarray:
    return np.random.default_rng(0).normal(0.0, size, count)


FLAT = math.log(10) + noise(120)
FALLING = np.linspace(math.log(10), 0.5, 120) + noise(120)
RISING = np.linspace(math.log(10), 6.0, 120) + noise(120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "classes", "factor", "expected"),
    [
        (FLAT, 10, 1.0, ("warning", "guessing among 10 classes")),
        (FLAT[:60], 10, 1.0, ("info", "guessing among 10 classes")),
        (FLAT / 4, 10, 0.25, ("warning", "guessing among 10 classes")),
        (RISING, 10, 1.0, ("warning", "rises above that of guessing")),
        (1.0 + np.linspace(0, 1, 120), 10, 1.0, ("warning", "never falls below its start")),
        (1.0 + np.linspace(0, 1, 120), None, 1.0, ("info", "never falls below its start")),
    ],
)
def test_loss_that_does_not_fall(
    losses: np.ndarray, classes: int | None, factor: float, expected: tuple[str, str], tmp_path: Path
) -> None:
    (found,) = evaluated(tmp_path / "run", losses, classes, factor)
    assert (found.rule, found.severity.value) == ("loss_not_falling", expected[0])
    assert expected[1] in found.title
    assert found.evidence[0].value == pytest.approx(losses[-1])


@pytest.mark.parametrize(
    ("losses", "classes"),
    [
        (FALLING, 10),
        (FALLING, None),
        (FLAT[:20], 10),
        (np.where(np.arange(120) < 100, FLAT, 1.0), 10),  # a plateau at chance that ends
        (0.5 + noise(120, 0.1), 10),  # goes on with a trained model
        (noise(120, 1.0), None),  # an actor
        (np.linspace(-0.1, 0.1, 120) + noise(120), None),  # an actor whose advantages shrink
        (np.full(120, np.nan), 10),
    ],
    ids=["falling", "regression", "short", "plateau", "resumed", "actor", "rising actor", "nan"],
)
def test_healthy_or_unknown_loss_is_not_reported(
    losses: np.ndarray, classes: int | None, tmp_path: Path
) -> None:
    assert evaluated(tmp_path / "run", losses, classes) == []


SAMPLED = [*range(64), *range(64, 5000, 64)]
"""Steps as the budget samples them in a long run of short steps."""


@pytest.mark.slow
def test_parts_are_cut_by_step(tmp_path: Path) -> None:
    """Half of the recorded losses are those of the first 64 steps, at chance in both runs."""
    learned = np.where(np.array(SAMPLED) < 2500, math.log(2), 0.01)
    assert evaluated(tmp_path / "learned", learned, 2, steps=SAMPLED) == []
    (found,) = evaluated(tmp_path / "flat", np.full(len(SAMPLED), math.log(2)), 2, steps=SAMPLED)
    assert found.title == "The loss is that of guessing among 2 classes"


def test_loss_that_is_not_recorded_to_the_end_is_inconclusive(tmp_path: Path) -> None:
    flat = np.full(len(SAMPLED), math.log(2))
    ended = [step for step in SAMPLED if step < 4500] + [4999]
    assert evaluated(tmp_path / "run", flat, 2, steps=ended) == []


def train(path: Path, labels_of: Callable[[torch.Tensor], torch.Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with backlight.watch(run=path, monitors=("correctness",), every=1, quiet=True):
        for _ in range(300):
            x = torch.randn(64, 4)
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels_of(x)).backward()
            optimizer.step()
    return list(evaluate_rules(backlight.open_run(path)))


@pytest.mark.slow
@pytest.mark.usefixtures("read_targets")
def test_labels_that_belong_to_other_inputs(tmp_path: Path) -> None:
    def labels(x: torch.Tensor) -> torch.Tensor:
        return x[:, :3].argmax(1)

    (found,) = train(tmp_path / "shuffled", lambda x: labels(x)[torch.randperm(len(x))])
    assert found.title == "The loss is that of guessing among 3 classes"
    assert train(tmp_path / "control", labels) == []
