"""Every moment belongs to one phase, and injected sleeps are assigned to their phase."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from backlight.capture.forward import Forwards
from backlight.capture.hub import HUB, Listener
from backlight.capture.parameters import Scope
from backlight.capture.phase_clock import PhaseClock
from backlight.capture.step_summary import StepSummary
from backlight.capture.steps import StepTracker
from backlight.records import Phase


class Times:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    monkeypatch.setattr("backlight.capture.phase_clock.clock.monotonic_ns", times)
    return times


def played(clock: PhaseClock, times: Times, moves: str) -> None:
    """Run transitions such as ``+forward 3 -forward 1``: open, wait, close."""
    for move in moves.split():
        if move[0] == "+":
            clock.enter(Phase(move[1:]))
        elif move[0] == "-":
            clock.leave(Phase(move[1:]))
        else:
            times.now += float(move)


MOVES: dict[str, tuple[dict[str, float], float]] = {
    "1 +data 2 -data 1 +forward 3 -forward 1 +backward 4 -backward 2": (
        {"data": 2, "forward": 3, "loss": 1, "backward": 4},
        14,
    ),
    # Without a backward, the time after the forward is not the loss.
    "+forward 3 -forward 1 +data 2 -data": ({"forward": 3, "data": 2}, 6),
    "+forward 3 -forward 1 +forward 2 -forward 1 +backward 1 -backward": (
        {"forward": 5, "loss": 2, "backward": 1},
        8,
    ),
    # A closure: time in no inner phase counts as the optimizer's.
    "+optimizer 1 +forward 2 -forward 1 +backward 3 -backward 1 -optimizer": (
        {"optimizer": 2, "forward": 2, "loss": 1, "backward": 3},
        8,
    ),
    # A nested model: its end does not end the outer forward.
    "+forward 1 +forward 2 -forward 3 -forward 1 +backward 1 -backward": (
        {"forward": 6, "loss": 1, "backward": 1},
        8,
    ),
    "+data 1 -data -data 1 -clip": ({"data": 1}, 2),
    "+optimizer 1 +clip 2 -optimizer 1": ({"optimizer": 1, "clip": 2}, 4),
}


@pytest.mark.parametrize(("moves", "expected"), MOVES.items())
def test_transitions_give_phases(times: Times, moves: str, expected: tuple[dict[str, float], float]) -> None:
    clock = PhaseClock()
    played(clock, times, moves)
    phases, seconds = clock.take()
    assert phases == pytest.approx(expected[0])
    assert seconds == expected[1]


def test_each_transition_is_reported_once(times: Times) -> None:
    changes: list[Phase] = []

    class Changes(Listener):
        def phase_changed(self, phase: Phase) -> None:
            changes.append(phase)

    clock, listener = PhaseClock(), Changes()
    HUB.add(listener)
    try:
        played(clock, times, "+data -data +forward +forward -forward -forward +backward -backward")
        played(clock, times, "+optimizer +forward -forward +backward -backward -optimizer -clip")
    finally:
        HUB.remove(listener)
    assert changes == [
        "data", "other", "forward", "loss", "backward", "other",
        "optimizer", "forward", "loss", "backward", "optimizer", "other",
    ]  # fmt: skip


def test_step_begins_where_the_previous_one_ended(times: Times) -> None:
    clock = PhaseClock()
    played(clock, times, "+forward 3 -forward 1")
    assert clock.take() == ({"forward": 3}, 4)
    assert not clock.separated
    played(clock, times, "2 +backward 1 -backward")
    assert clock.take() == ({"backward": 1}, 3)


class Recorded(StepTracker):
    """Stores the summaries."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.summaries: list[StepSummary] = []

    def step_opens(self, index: int) -> bool:
        return True

    def step_closes(self, summary: StepSummary) -> None:
        self.summaries.append(summary)


NAP = 0.02


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(2 * NAP)
        return self.layer(x)


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(NAP / 4)
        return torch.full((4,), float(index))


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(3 * NAP)
        return grad


@pytest.fixture
def tracked() -> Iterator[Callable[..., list[StepSummary]]]:
    attached: list[Any] = []

    def track(
        model: nn.Module, optimizer: torch.optim.Optimizer, train: Callable[[], None]
    ) -> list[StepSummary]:
        tracker, forwards = Recorded(Scope([model], [optimizer])), Forwards()
        tracker.start()
        forwards.follow([model])
        attached.extend((tracker, forwards))
        train()
        tracker.finish()
        return tracker.summaries

    yield track
    for tracker, forwards in zip(attached[::2], attached[1::2], strict=True):
        HUB.remove(tracker)
        forwards.leave()


def test_injected_sleeps_are_assigned_to_their_phases(tracked: Callable[..., list[StepSummary]]) -> None:
    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for batch in DataLoader(Slow(), batch_size=4):
            output = model(batch)
            time.sleep(NAP)
            SleepInBackward.apply(output).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(batch)

    summaries = tracked(model, optimizer, train)
    assert len(summaries) == 3
    for summary in summaries:
        phases = summary.phases
        assert summary.separated
        assert phases["data"] >= NAP
        assert phases["forward"] >= 2 * NAP
        assert phases["loss"] >= NAP
        assert phases["backward"] >= 3 * NAP
        assert sum(phases.values()) <= summary.seconds
        # A step ends with its optimizer, so the evaluation after it belongs to the next step.
        assert ("evaluation" in phases) == (summary is not summaries[0])


def test_recomputed_forward_counts_as_backward(tracked: Callable[..., list[StepSummary]]) -> None:
    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        checkpoint(model, torch.ones(2, 4), use_reentrant=False).sum().backward()
        optimizer.step()

    (summary,) = tracked(model, optimizer, train)
    assert 2 * NAP <= summary.phases["forward"] < 4 * NAP
    assert summary.phases["backward"] >= 2 * NAP


def test_norm_computation_counts_as_clipping(
    tracked: Callable[..., list[StepSummary]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = torch._foreach_norm

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(NAP)
        return norm(*args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_norm", slow)

    def train() -> None:
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    (summary,) = tracked(model, optimizer, train)
    assert summary.phases["clip"] >= NAP


def test_exhausted_loader_leaves_no_open_phase(tracked: Callable[..., list[StepSummary]]) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            for batch in DataLoader(Slow(), batch_size=12):
                model(batch).sum().backward()
                optimizer.step()
            time.sleep(40 * NAP)

    second = tracked(model, optimizer, train)[1]
    assert second.phases["data"] < 30 * NAP
    assert second.seconds >= 40 * NAP
