"""The monitor that decomposes a spike: one thread at a time receives the answer of its child."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from backlight.monitors.health.samples_monitor import SpikeSamplesMonitor


class SlowChild:
    """A child whose answer is awaited until ``free`` is set."""

    age_s = 0.0

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()
        self.calls = 0

    def answer(self, timeout_s: float, *, wait: bool = True) -> Any:
        self.calls += 1
        self.asked.set()
        assert self.free.wait(60)
        return {"calls": []}


def test_child_is_not_asked_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monitor, child = SpikeSamplesMonitor(), SlowChild()
    monitor._receiving, monitor._requested = threading.Lock(), []
    monkeypatch.setattr(monitor, "_record", lambda step, *_: recorded.append(step))
    monitor._child = 7, {}, child  # type: ignore[assignment]
    waiting = threading.Thread(target=monitor._receive, kwargs={"wait": True})
    waiting.start()
    assert child.asked.wait(60)
    monitor._receive(wait=False)
    assert child.calls == 1
    child.free.set()
    waiting.join(60)
    monitor._receive(wait=True)
    assert (child.calls, recorded) == (1, [7])
