"""Every monitor observes forwards through one set of hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.capture.hub import HUB
from backlight.capture.modules import SeenModules
from backlight.watchdog import runtime_dir


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = tmp_path / "shared"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(runtime_dir, "candidates", lambda: [base])
    monkeypatch.setattr("backlight.monitors.stalls.monitor.StallMonitor._start_watchdog", lambda _self: None)


def train(run: Path | None, monitors: tuple[str, ...], *, given: bool = False) -> tuple[nn.Module, list[int]]:
    """Train three steps; return the model and whether its calls are reported, at each forward."""
    torch.manual_seed(3)
    reported: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            reported.append(int("__call__" in vars(Model)))
            assert not self._forward_pre_hooks
            assert not self._forward_hooks
            return self.layer(x)

    model = Model()

    def loop() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if run is None:
        loop()
    else:
        with backlight.watch(model if given else None, run=run, monitors=monitors, every=1):
            loop()
    return model, reported


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "monitors", [("steptime",), ("stalls",), ("steptime", "stalls"), ("health", "stalls", "steptime")]
)
def test_each_forward_is_tracked_once(tmp_path: Path, monitors: tuple[str, ...], given: bool) -> None:
    model, reported = train(tmp_path / "run", monitors, given=given)
    assert reported == [1, 1, 1]
    assert "__call__" not in vars(type(model))
    plain, _ = train(None, ())
    for watched, unwatched in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(watched, unwatched)
    if "steptime" in monitors:
        run = backlight.open_run(tmp_path / "run")
        assert len(run.scalar("phase/forward").steps) == 3
        assert len(run.scalar("phase/loss").steps) == 3
        assert "phase/between" not in run.scalar_names()


@pytest.mark.slow
def test_no_forward_hooks_without_a_forward_monitor(tmp_path: Path) -> None:
    assert train(tmp_path / "run", ("grokking",))[1] == [0, 0, 0]


@pytest.mark.slow
def test_process_is_searched_once_for_many_optimizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []
    real = SeenModules.scan

    def scan(modules: SeenModules) -> None:
        searches.append(1)
        real(modules)

    monkeypatch.setattr(SeenModules, "scan", scan)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(9)]  # in no module, so each would start a search
    counted = []
    for count in (1, 9):
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters[:count]]
        with backlight.watch(run=tmp_path / str(count), monitors=("steptime",)):
            assert len(HUB.optimizers.existing()) >= count
            entering = len(searches)
            parameters[0].sum().backward()
            optimizers[0].step()
        counted.append(entering)
        searches.clear()
    assert counted == [1, 1]


@pytest.mark.slow
def test_internal_forward_error_does_not_reach_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: object, *_call: object) -> None:
        raise RuntimeError("broken heartbeat")

    monkeypatch.setattr("backlight.monitors.stalls.instrument.heartbeat.Heartbeat.forward_begin", broken)
    model, reported = train(tmp_path / "run", ("stalls", "steptime"))
    assert len(reported) == 3
    run = backlight.open_run(tmp_path / "run")
    (event,) = [e for e in run.events("unmeasured") if "broken heartbeat" in str(e.payload.get("reason"))]
    assert event.payload["what"] == "stalls from here on"
    assert len(run.scalar("phase/forward").steps) == 3
    assert model.layer.weight.isfinite().all()
