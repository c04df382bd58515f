"""Device time of recorded steps: known late, never waited for, and part of the budget."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch

import backlight
from backlight import clock
from backlight.devices import WorkTimer
from backlight.monitors.health.monitor import GradientMonitor

WORK_S = 0.02
DEVICE = torch.device("sim")


def test_spans_are_counted_once_their_work_is_done() -> None:
    timer = WorkTimer()
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    with simulated.no_synchronization():
        start.record()
        for _ in range(2):
            with timer.span(DEVICE):
                simulated.sleep(WORK_S)
            simulated.sleep(WORK_S)  # not in a span
        end.record()
        timer.end_group()
        assert timer.spent == 0.0
    torch.accelerator.synchronize()
    timer.end_group()
    assert 2 * WORK_S <= timer.spent <= start.elapsed_time(end) / 1e3 - 2 * WORK_S


def test_wait_for_a_late_host_is_not_counted() -> None:
    timer = WorkTimer()
    spent = []
    for pause in (0.0, 20 * WORK_S):
        with timer.span(DEVICE):
            simulated.sleep(WORK_S)
            time.sleep(pause)
        timer.end_group()
        torch.accelerator.synchronize()
        timer.end_group()
        spent.append(timer.spent)
    assert spent[0] + WORK_S <= spent[1] <= 3 * spent[0]


def test_device_time_thins_the_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "thread_time", lambda: 0.0)  # the host costs nothing
    measure = GradientMonitor.on_gradients_ready

    def launch(self: Any, *arguments: Any) -> None:
        simulated.sleep(WORK_S)
        measure(self, *arguments)

    monkeypatch.setattr(GradientMonitor, "on_gradients_ready", launch)
    model = torch.nn.Linear(3, 2).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(1, 3, device="sim")
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors="health", summary=False):
        for _ in range(40):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            torch.accelerator.synchronize()
    recorded = list(backlight.open_run(tmp_path / "run").series_steps("gradient"))
    assert recorded[:4] == [0, 1, 2, 3]
    assert len(recorded) < 20
