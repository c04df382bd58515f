"""Events at phase boundaries are read in order, without a wait inside a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backlight.capture.forward import Forwards
from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope
from backlight.capture.steps import StepTracker
from backlight.diagnose.profile.observer import MAX_PENDING_STEPS, DevicePhases
from backlight.records import Phase


class Stream:
    """A device with a manual clock, which completes events on request."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = 0.0
        self.waits = 0
        self.created = 0

    def event(self) -> Event:
        self.created += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self) -> None:
        self.at = self.stream.now

    def query(self) -> bool:
        return self.at <= self.stream.passed

    def synchronize(self) -> None:
        self.stream.waits += 1
        self.stream.passed = max(self.stream.passed, self.at)

    def elapsed_time(self, end_event: Event) -> float:
        assert end_event.query()
        return (end_event.at - self.at) * 1e3


STEP = {"data": 1.0, "forward": 2.0, "loss": 3.0, "backward": 4.0, "other": 5.0}


def run_step(phases: DevicePhases, stream: Stream) -> None:
    """One step: data 1 s, forward 2, loss 3, backward 4, rest 5."""
    for phase, seconds in STEP.items():
        phases.phase_changed(Phase(phase))
        stream.now += seconds
    phases.end_step()


def test_phases_are_read_once_the_device_has_completed_them() -> None:
    stream = Stream()
    phases = DevicePhases(stream.event)
    for _ in range(3):
        run_step(phases, stream)
    assert phases.steps == []
    stream.passed = 40.0  # the end of the second step is at 30, of the third at 45
    run_step(phases, stream)
    assert phases.steps == [STEP]  # the first step has no begin
    assert stream.waits == 0
    phases.finish()
    assert phases.steps == [STEP] * 3
    assert phases.dropped_steps == 0


def test_events_are_reused() -> None:
    stream = Stream()
    phases = DevicePhases(stream.event)
    for _ in range(50):
        run_step(phases, stream)
        stream.passed = stream.now
    assert len(phases.steps) == 48
    assert stream.created < 40


def test_pending_steps_over_the_limit_are_dropped_and_counted() -> None:
    stream = Stream()
    phases = DevicePhases(stream.event)
    stream.passed = -1.0
    for _ in range(MAX_PENDING_STEPS + 6):
        run_step(phases, stream)
    assert phases.dropped_steps == 5
    assert stream.waits == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_long_backward_on_a_device_is_measured_as_backward() -> None:
    model = nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    phases, forwards = DevicePhases(), Forwards()
    tracker = StepTracker(Scope([model], [optimizer]))
    tracker.start()
    HUB.add(phases)
    forwards.follow([model])
    cycles = 50_000_000

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            torch.cuda._sleep(cycles)
            return grad

    x = torch.ones(64, 512, device="cuda")
    for _ in range(6):
        Sleep.apply(model(x)).sum().backward()
        optimizer.step()
        phases.end_step()
    tracker.finish()
    HUB.remove(phases)
    forwards.leave()
    phases.finish()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    slept = begin.elapsed_time(end) / 1e3
    assert len(phases.steps) == 5
    for step in phases.steps:
        assert step["backward"] == pytest.approx(slept, rel=0.1)
        assert step["forward"] < slept / 2
