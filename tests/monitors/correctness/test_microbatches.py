"""The number of classes of a loss, and microbatches of different lengths that are not reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.correctness.rules.uneven_microbatches import Classes
from backlight.store.read.run import Run
from faults.silent.loop import perceptron, train
from faults.silent.microbatches import accumulate, mean_of_means

pytestmark = pytest.mark.slow


def watched(path: Path, train: Callable[[], None]) -> Run:
    with backlight.watch(run=path, monitors=("correctness",)):
        train()
    run = backlight.open_run(path)
    assert not run.events("unmeasured")
    return run


@pytest.mark.usefixtures("read_targets")
def test_one_shorter_microbatch_per_epoch_is_not_reported(tmp_path: Path) -> None:
    run = watched(
        tmp_path / "run", lambda: accumulate(mean_of_means, ((8, 8), (8, 8), (8, 8), (8, 8), (8, 2)))
    )
    assert [event.payload["targets"] for event in run.events("contradiction")] == [[8, 2]]
    assert evaluate_rules(run) == []


@pytest.mark.usefixtures("read_targets")
@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (F.cross_entropy, [{"classes": 3, "factor": 1.0}]),
        (lambda out, y: F.cross_entropy(out, y) / 4, [{"classes": 3, "factor": 0.25}]),
        (lambda out, y: F.cross_entropy(out, y) + out.square().mean(), []),
        (lambda out, y: F.cross_entropy(out, y, reduction="sum"), []),
        (lambda out, y: F.cross_entropy(out, y, reduction="none").mean(), []),
    ],
)
def test_classes_of_a_loss(
    loss_of: Callable[[Tensor, Tensor], Tensor], expected: list[dict[str, float]], tmp_path: Path
) -> None:
    run = watched(tmp_path / "run", lambda: train(perceptron(), loss_of=loss_of))
    assert [event.payload for event in run.events(Classes.event)] == expected


def test_loss_in_a_checkpoint_is_computed_again_once_per_backward(tmp_path: Path) -> None:
    calls = []

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        def inside(out: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return F.cross_entropy(out, y)

        return checkpoint(inside, out, use_reentrant=False)

    watched(tmp_path / "run", lambda: train(perceptron(), loss_of=loss_of, steps=3))
    assert len(calls) == 6


def test_microbatches_that_torch_does_not_show_are_stated_as_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backlight.monitors.correctness.instrument.uneven_microbatches.SHOWS_HOOKS", False)
    monkeypatch.setattr("backlight.capture.loss_graph.SHOWS_HOOKS", False)
    with backlight.watch(run=tmp_path / "run", monitors=("correctness",)):
        accumulate(mean_of_means)
    (event,) = backlight.open_run(tmp_path / "run").events("unmeasured")
    assert event.payload["what"] == "uneven_microbatches"
    assert "does not show" in event.payload["reason"]
