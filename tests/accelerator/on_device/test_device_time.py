"""Device time of phases against the work that was given to the device, and memory against its allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import simulated
import torch
from torch import Tensor, nn

import backlight
from backlight import devices
from backlight.capture.hub import HUB
from backlight.diagnose.profile.observer import DevicePhases
from backlight.records import Phase

FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.03, 0.06, 0.02
STEPS = 4


class Busy(torch.autograd.Function):
    """Keeps the device busy in forward and backward, and the host not at all."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        simulated.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        simulated.sleep(BACKWARD_S)
        return gradient.clone()


class BusyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device="sim")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Busy.apply(self.linear(x))
        return out


class BusySgd(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        simulated.sleep(OPTIMIZER_S)
        super().step(closure)


class Steps(DevicePhases):
    """Ends a step of the device phases with that of the optimizer."""

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        self.end_step()


def test_phases_take_the_time_that_was_set(tmp_path: Path) -> None:
    model = BusyModel()
    optimizer = BusySgd(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device="sim")
    phases = Steps()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1000, monitors=("steptime",)):
        HUB.add(phases)
        for _ in range(STEPS):
            with simulated.no_synchronization():
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        HUB.remove(phases)
    phases.finish()
    assert len(phases.steps) == STEPS - 1  # the first one has no begin
    for times in phases.steps:
        assert times[Phase.FORWARD] >= FORWARD_S
        assert times[Phase.BACKWARD] >= BACKWARD_S
        assert times[Phase.FORWARD] + times[Phase.BACKWARD] + OPTIMIZER_S <= sum(times.values())


def test_runtime_info_has_the_allocators_peak(tmp_path: Path) -> None:
    devices.reset_peak_memory()
    model = nn.Linear(64, 64).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            held = torch.zeros(1 << 20, device="sim")
            model(torch.ones(2, 64, device="sim")).sum().backward()
            del held
            optimizer.step()
    (event,) = backlight.open_run(tmp_path / "run").events("runtime_info")
    memory = event.payload["memory"]
    assert memory["where"] == "device"
    assert memory["peak"] == torch.accelerator.max_memory_allocated() > 4 << 20
    assert memory["reserved"] == torch.accelerator.max_memory_reserved()
    assert (
        devices.free_memory(torch.device("sim")),
        memory["capacity"],
    ) == torch.accelerator.get_memory_info()
    assert memory["retries"] == 0


SCRIPT = """
import simulated, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to("sim")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(16, 32, device="sim")).square().mean().backward()
    optimizer.step()
"""


# Whether steps of a busy machine have a steady part is not asked here.
ALL_IS_STEADY = (
    "from backlight.monitors.steptime.model import step_times; step_times.TOLERANCE = float('inf'); "
)


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    path = Path(simulated.__file__).parent
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {ALL_IS_STEADY}"
         "from backlight.cli.app import main; main()", *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.full
def test_memory_of_a_script_is_that_of_the_allocator(tmp_path: Path) -> None:
    done = command(tmp_path, "memory", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == "sim"
    allocator = found["allocator"]
    assert allocator["reserved_peak"] >= allocator["allocated_peak"] >= found["peak"] > 0


@pytest.mark.full
def test_profile_separates_host_and_device(tmp_path: Path) -> None:
    done = command(tmp_path, "profile", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["memory"]["of"] == "device"
    assert all(found["device_phases"][name] > 0 for name in ("forward", "backward", "optimizer"))
