"""Readings of the machine: memory of the process against the kernel, counters of a GPU by a fake of NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import backlight
from backlight import clock, processes
from backlight.monitors.steptime.instrument.machine import MachineReadings
from backlight.monitors.steptime.model.evidence import HOST_MEMORY

UUID = "8a6b2ecb-0000-0000-0000-000000000000"


class Nvml(ModuleType):
    """The functions of pynvml that are used; ``reasons`` are those of a lower clock."""

    NVMLError = RuntimeError
    NVML_TEMPERATURE_GPU = 0
    reasons = 0x40 | 0x04

    def nvmlInit(self) -> None:  # noqa: N802 - the name of NVML
        """Count nothing."""

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802 - the name of NVML
        if name != f"GPU-{UUID}":
            raise RuntimeError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802 - the name of NVML
        return SimpleNamespace(gpu=62, memory=11)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802 - the name of NVML
        return SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802 - the name of NVML
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802 - the name of NVML
        return self.reasons


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that is read, in seconds."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(clock, "monotonic", lambda: now.seconds)
    return now


def test_memory_is_what_the_kernel_counts() -> None:
    """psutil reads another file; the process may grow between both."""
    block = torch.ones(2**25)
    resident = processes.resident_memory()
    assert abs(resident - psutil.Process().memory_info().rss) < 2**24
    assert resident > block.nbytes


def test_counters_of_the_gpu_are_those_of_the_driver(nvml: Nvml) -> None:
    missing: list[str] = []
    values = MachineReadings(UUID, missing.append).read(3)
    assert values.pop(HOST_MEMORY) > 0
    assert values == {"gpu/utilization": 0.62, "gpu/memory": 3 * 2**30, "gpu/throttled": 1.0}
    assert not missing
    nvml.reasons = 0x04  # a cap of power that the user has set
    assert MachineReadings(UUID, missing.append).read(3)["gpu/throttled"] == 0.0


@pytest.mark.parametrize(
    ("uuid", "module", "reason"),
    [
        ("other", Nvml("pynvml"), "NVML: Not Found"),
        (UUID, None, "nvidia-ml-py is not installed (pip install 'backlight[gpu]')"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_reported_once(
    uuid: str, module: Nvml | None, reason: str, monkeypatch: pytest.MonkeyPatch, at: SimpleNamespace
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None makes the import fail
    missing: list[str] = []
    readings = MachineReadings(uuid, missing.append)
    for step in range(3):
        at.seconds = float(step)
        assert set(readings.read(step)) == {HOST_MEMORY}
    assert missing == [reason]


def test_readings_become_rare_and_each_has_a_step(at: SimpleNamespace) -> None:
    readings = MachineReadings(None, pytest.fail)
    assert readings.read(0)
    at.seconds = 10.0
    assert not readings.read(0)  # the same step
    assert readings.read(1)
    at.seconds = 10.05
    assert not readings.read(2)  # not due: 1 % of 10 s
    at.seconds = 10.11
    assert readings.read(2)


@pytest.mark.slow
def test_a_watched_run_records_the_memory_of_its_process(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", monitors=["steptime"], flush_interval=0.01, quiet=True
    ):
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            clock.sleep(0.002)
    scalar = backlight.open_run(tmp_path / "run").scalar(HOST_MEMORY)
    assert len(scalar.steps) >= 3
    assert (scalar.values > 2**26).all()  # torch alone takes more
