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
from backlight.monitors.correctness.model.facts import encode
from backlight.monitors.correctness.rules.uneven_microbatches import Classes, RankTargets
from backlight.records import Finding, RunStatus
from backlight.store.read.run import Run
from faults.silent.loop import perceptron, train
from faults.silent.microbatches import accumulate, mean_of_means
from run_builder import fill, open_ranks

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


def of_ranks(
    path: Path, targets: list[list[int]], weights: list[list[float]], ranks: tuple[int, ...] = (0, 1)
) -> list[Finding]:
    """Return the findings on ranks with these targets and weights at each step."""
    for writer, counts, of_a_target in zip(
        open_ranks(path, monitors=("correctness",)), targets, weights, strict=True
    ):
        steps = enumerate(zip(counts, of_a_target, strict=True))
        facts = [RankTargets(step, count, weight, ranks) for step, (count, weight) in steps]
        fill(writer, events=[(fact.step, fact.event, encode(fact)) for fact in facts])
        writer.close(RunStatus.FINISHED)
    return evaluate_rules(backlight.open_run(path))


def means(targets: list[list[int]]) -> list[list[float]]:
    """Return the weights of targets where each rank takes the mean."""
    return [[1 / count for count in counts] for counts in targets]


def test_mean_of_each_rank_is_reported(tmp_path: Path) -> None:
    (finding,) = of_ranks(
        tmp_path / "run",
        [[160, 150, 170], [16, 30, 17]],
        [[1 / 160, 1 / 150, 1 / 170], [1 / 16, 1 / 30, 1 / 17]],
    )
    assert (finding.rule, finding.subject.step) == ("uneven_microbatches", 0)
    assert "160 on rank 0, 16 on rank 1" in finding.detail
    assert finding.evidence[0].value == 10.0


@pytest.mark.parametrize(
    ("targets", "divisors", "ranks"),
    [
        ([[160, 150, 170], [16, 30, 17]], [[88, 90, 94], [88, 90, 94]], (0, 1)),
        ([[160, 150, 170], [140, 160, 155]], [[160, 150, 170], [140, 160, 155]], (0, 1)),
        ([[160, 160, 160], [16, 160, 160]], [[160, 160, 160], [16, 160, 160]], (0, 1)),
        ([[160, 150, 170], [16, 30, 17]], [[160, 150, 170], [16, 30, 17]], (0, 1, 2)),
    ],
    ids=["divided by all targets", "about the same length", "at one step", "a rank that did not record"],
)
def test_ranks_that_are_not_reported(
    targets: list[list[int]], divisors: list[list[int]], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    assert of_ranks(tmp_path / "run", targets, means(divisors), ranks) == []


def test_rank_records_the_weight_of_its_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "backlight.monitors.correctness.instrument.uneven_microbatches.averaged_over", lambda _: [0, 1]
    )
    monkeypatch.setattr("backlight.monitor.rank_and_size", lambda: (0, 2))
    run = watched(tmp_path / "run", lambda: accumulate(mean_of_means, steps=3))
    recorded = [event.payload for event in run.events(RankTargets.event)]
    assert [payload["targets"] for payload in recorded] == [10, 10, 7]
    # Each of two microbatches is half of the gradient, shared by its targets.
    assert [payload["weight"] for payload in recorded] == pytest.approx(
        [2 * 0.5 / 10, 2 * 0.5 / 10, 2 * 0.5 / 7]
    )
