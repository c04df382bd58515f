"""The phases on the board, from the first step on, and backwards inside and beside the ordinary one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import backlight
from backlight.monitors.stalls.model import runtime_dir
from backlight.monitors.stalls.model.shared_state import StateSnapshot, read_state
from backlight.records import Phase


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path / "shared"
    base.mkdir()
    monkeypatch.setattr(runtime_dir, "base", lambda: base)
    return base


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second process: what is tested here is written by the training itself."""
    monkeypatch.setattr("backlight.monitors.stalls.monitor.StallMonitor._start_watchdog", lambda _self: None)


def board(place: Path) -> StateSnapshot:
    (path,) = place.glob("backlight-*/rank-00000.board")
    state = read_state(path)
    assert state is not None
    return state


class Spy(nn.Module):
    """Notes the phase in which it is called."""

    def __init__(self, place: Path, said: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place, self.said = place, said

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append(board(self.place).phase)
        return self.linear(x)


class Note(torch.autograd.Function):
    """Notes what the board says while backward runs."""

    said: list[StateSnapshot] = []  # noqa: RUF012 - a static function has no other place
    place: Path

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Note.said.append(board(Note.place))
        return grad


def test_every_phase_is_seen_from_the_first_step_on(tmp_path: Path, place: Path) -> None:
    said: list[Any] = []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = Spy(place, said)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2):
            said.append(board(place).phase)
            loss = model(x).square().mean()
            said.append(board(place).phase)
            loss.backward()
            said.append(board(place).phase)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 4))
            said.append(board(place).phase)
    step = [Phase.OTHER, Phase.FORWARD, Phase.LOSS, Phase.OTHER]
    assert said == [*step, *step, Phase.EVALUATION, Phase.EVALUATION]


@pytest.mark.parametrize("given", [True, False])
def test_a_model_made_before_watching_is_seen_in_its_first_forward(
    tmp_path: Path, place: Path, *, given: bool
) -> None:
    said: list[Any] = []
    model = Spy(place, said)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model if given else None, run=tmp_path / "run", monitors="stalls"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert said == [Phase.FORWARD]
    assert not model._forward_hooks


def test_a_forward_that_raised_is_not_gone_on_with(tmp_path: Path, place: Path) -> None:
    said: list[Any] = []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = Spy(place, said)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 3))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert board(place).forwards == 2
    assert said == [Phase.FORWARD, Phase.FORWARD]


def test_gradients_by_autograd_grad_are_a_backward_with_a_position(tmp_path: Path, place: Path) -> None:
    Note.place, Note.said = place, []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4, requires_grad=True)
        y = Note.apply(model(x)) * 2
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert board(place).phase is Phase.LOSS
        (y.sum() + grad.square().sum()).backward()
        optimizer.step()
        last = board(place)
    inside, outer = Note.said[:2]
    assert inside.phase is Phase.BACKWARD
    assert (inside.nodes_total, inside.expected, inside.backwards) == (5, 0, 0)
    assert inside.nodes_done == 2  # the sum and the product are done
    assert outer.phase is Phase.BACKWARD
    assert outer.nodes_total > inside.nodes_total  # the graph went on to grow
    assert (last.backwards, last.step) == (1, 1)


def test_an_exception_in_backward_is_no_progress_of_its_own(tmp_path: Path, place: Path) -> None:
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(KeyboardInterrupt):
            Raising.apply(x).sum().backward()
        assert board(place).raised == 1
        x.sum().backward()
        assert (board(place).raised, board(place).backwards) == (1, 2)


def test_arrivals_are_told_by_parameter(tmp_path: Path, place: Path) -> None:
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for name in ("a", "b"):
            model[name](torch.ones(1, 2)).sum().backward()
            assert board(place).arrived == (b"\1\1\0\0" if name == "a" else b"\0\0\1\1")
            optimizer.step()
            optimizer.zero_grad()


def test_recomputation_is_not_taken_for_a_forward(tmp_path: Path, place: Path) -> None:
    said: list[Any] = []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = Spy(place, said)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum().backward()
        optimizer.step()
    assert said == [Phase.EVALUATION, Phase.BACKWARD]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_model_that_is_compiled_later_compiles_as_often_as_without_us(tmp_path: Path, place: Path) -> None:
    from torch._dynamo.utils import counters

    def train(*, watched: bool) -> tuple[int, torch.Tensor]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if watched:
            assert len(model._forward_pre_hooks) == 1
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(4):
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return counters["stats"]["unique_graphs"], model[0].weight.detach().clone()

    plain = train(watched=False)
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        watched = train(watched=True)
    assert plain[0] == watched[0] == 1
    assert torch.equal(plain[1], watched[1])
