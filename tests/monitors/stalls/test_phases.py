"""Phases in the shared state, from the first step on, and other backward passes than the step's."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import backlight
from backlight.records import Phase
from backlight.watchdog.shared_state import StateSnapshot, read_state


@pytest.fixture(autouse=True)
def _no_watchdog_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backlight.monitors.stalls.monitor.StallMonitor._start_watchdog", lambda _self: None)


def read_shared_state(directory: Path) -> StateSnapshot:
    (path,) = directory.glob("*/rank-00000.state")
    return read_state(path)


class PhaseRecorder(nn.Module):
    """Records the phase in which it is called."""

    def __init__(self, directory: Path, recorded: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.directory, self.recorded = directory, recorded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recorded.append(read_shared_state(self.directory).phase)
        return self.linear(x)


class StateRecorder(torch.autograd.Function):
    """Records the shared state while backward runs."""

    recorded: list[StateSnapshot] = []  # noqa: RUF012 - read by a static method
    directory: Path

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        StateRecorder.recorded.append(read_shared_state(StateRecorder.directory))
        return grad


def test_every_phase_is_recorded_from_the_first_step_on(tmp_path: Path, directory: Path) -> None:
    recorded: list[Any] = []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = PhaseRecorder(directory, recorded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2):
            recorded.append(read_shared_state(directory).phase)
            loss = model(x).square().mean()
            recorded.append(read_shared_state(directory).phase)
            loss.backward()
            recorded.append(read_shared_state(directory).phase)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 4))
            recorded.append(read_shared_state(directory).phase)
    step = [Phase.OTHER, Phase.FORWARD, Phase.LOSS, Phase.OTHER]
    assert recorded == [*step, *step, Phase.EVALUATION, Phase.EVALUATION]


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_first_forward_of_an_earlier_model_is_recorded(
    tmp_path: Path, directory: Path, *, given: bool
) -> None:
    recorded: list[Any] = []
    model = PhaseRecorder(directory, recorded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model if given else None, run=tmp_path / "run", monitors="stalls"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert recorded == [Phase.FORWARD]
    assert not model._forward_hooks


@pytest.mark.slow
def test_forward_after_one_that_raised_is_recorded(tmp_path: Path, directory: Path) -> None:
    recorded: list[Any] = []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = PhaseRecorder(directory, recorded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 3))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert read_shared_state(directory).forwards == 2
    assert recorded == [Phase.FORWARD, Phase.FORWARD]


@pytest.mark.slow
def test_autograd_grad_is_a_backward_with_a_position(tmp_path: Path, directory: Path) -> None:
    StateRecorder.directory, StateRecorder.recorded = directory, []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4, requires_grad=True)
        y = StateRecorder.apply(model(x)) * 2
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert read_shared_state(directory).phase is Phase.LOSS
        (y.sum() + grad.square().sum()).backward()
        optimizer.step()
        last = read_shared_state(directory)
    inside, outer = StateRecorder.recorded[:2]
    assert inside.phase is Phase.BACKWARD
    assert (inside.nodes_total, inside.expected, inside.backwards) == (5, 0, 0)
    assert inside.nodes_done == 2  # the sum and the product are done
    assert outer.phase is Phase.BACKWARD
    assert outer.nodes_total > inside.nodes_total  # the graph went on to grow
    assert (last.backwards, last.step) == (1, 1)


@pytest.mark.slow
def test_exception_in_backward_is_counted(tmp_path: Path, directory: Path) -> None:
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
        assert read_shared_state(directory).raised == 1
        x.sum().backward()
        assert (read_shared_state(directory).raised, read_shared_state(directory).backwards) == (1, 2)


@pytest.mark.slow
def test_arrived_gradients_are_recorded_by_parameter(tmp_path: Path, directory: Path) -> None:
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for name in ("a", "b"):
            model[name](torch.ones(1, 2)).sum().backward()
            assert read_shared_state(directory).arrived == (b"\1\1\0\0" if name == "a" else b"\0\0\1\1")
            optimizer.step()
            optimizer.zero_grad()


def test_recomputation_is_not_a_forward(tmp_path: Path, directory: Path) -> None:
    recorded: list[Any] = []
    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        model = PhaseRecorder(directory, recorded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum().backward()
        optimizer.step()
    assert recorded == [Phase.EVALUATION, Phase.BACKWARD]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_watched_model_compiles_as_often_as_an_unwatched_one(tmp_path: Path, directory: Path) -> None:
    from torch._dynamo.utils import counters

    def train(*, watched: bool) -> tuple[int, torch.Tensor]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if watched:
            assert "__call__" in vars(nn.Sequential)
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


@pytest.mark.slow
def test_longest_time_between_phases_is_recorded(tmp_path: Path, directory: Path) -> None:
    """A rollout before the first update counts, and short pauses after it do not lower it."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors="stalls"):
        begin = time.monotonic()
        time.sleep(0.2)
        rollout_s = time.monotonic() - begin
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert read_shared_state(directory).longest_other_s >= rollout_s


def test_thread_that_trains_is_the_one_that_is_sampled(tmp_path: Path, directory: Path) -> None:
    """The thread that attaches counts until the first backward, as for ``backlight run``."""
    found: dict[str, tuple[int, int]] = {}

    def note(name: str) -> None:
        state = read_shared_state(directory)
        found[name] = state.main_ident, state.main_tid
        found[f"{name} own"] = threading.get_ident(), threading.get_native_id()

    def train() -> None:
        model = nn.Linear(4, 1)
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        note("trained")

    with backlight.watch(run=tmp_path / "run", monitors="stalls"):
        note("attached")
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert found["attached"] == found["attached own"]
    assert found["trained"] == found["trained own"] != found["attached"]
