"""A build of torch for a device that the script does not use: nothing asks its driver."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight import devices


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that ask the driver of CUDA, in the order of their calls."""
    calls: list[str] = []

    def ask(name: str, answer: object) -> None:
        monkeypatch.setattr(torch.accelerator, name, lambda *_: calls.append(name) or answer)

    ask("is_available", True)
    ask("device_count", 1)
    ask("current_stream", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    return calls


@pytest.mark.slow
def test_watching_a_loop_on_the_host_asks_no_driver(asked: list[str], tmp_path: Path) -> None:
    """A process that has asked once cannot fork children that use CUDA."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False) as watch:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            watch.log(mine=torch.ones(1))
    assert not asked
    assert not devices.is_in_use()
    assert devices.kind() == "cuda"  # what a command asks
    assert asked == ["is_available"]


@pytest.mark.parametrize(
    ("free", "reserved", "lacks"), [(60, 500, False), (49, 500, True), (0, 551, False), (None, 500, False)]
)
def test_memory_of_one_more_pass(
    monkeypatch: pytest.MonkeyPatch, free: int | None, reserved: int, lacks: bool
) -> None:
    """A pass has taken 40 bytes at most, its gradients are 10 more; what torch has cached is free."""
    statistics = {
        "allocated_bytes.all.current": 500, "allocated_bytes.all.peak": 540,
        "reserved_bytes.all.current": reserved,
    }  # fmt: skip
    monkeypatch.setattr(devices, "free_memory", lambda _: free)
    monkeypatch.setattr(devices, "allocator_statistics", lambda _: statistics)
    assert devices.lacks_memory_of_a_pass(torch.device("cpu"), 10) is lacks
