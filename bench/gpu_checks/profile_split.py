"""`profile` of a launch-bound and of a device-bound script against sums of the scripts themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from check import Check

EXPECTED = (
    "device time by phase and wall time within 15 % of the script's own events; the one script alone is "
    "launch-bound"
)
FORWARD_S, BACKWARD_S = 0.02, 0.04
"""Seconds for which the device-bound script keeps the simulated device busy."""

SCRIPT = """
import json, statistics, sys, time
kind, way, out = sys.argv[1:]
if kind == "sim":
    import simulated
import torch
from torch import nn

class Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        simulated.sleep(FORWARD_S)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        simulated.sleep(BACKWARD_S)
        return gradient.clone()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        width = 16 if kind == "sim" else 4096 if way == "device" else 64
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8 if way == "device" else 100)))
        self.x = torch.randn(16 if kind == "sim" else 4096 if way == "device" else 16, width)
    def forward(self, x):
        y = self.layers(x)
        return Busy.apply(y) if kind == "sim" and way == "device" else y

torch.manual_seed(0)
model = Model().to(kind)
x = model.x.to(kind)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
steps, walls = [], []
for number in range(45):
    begin = time.perf_counter()
    marks = [torch.Event(kind, enable_timing=True) for _ in range(4)]
    optimizer.zero_grad()
    marks[0].record()
    loss = model(x).square().mean()
    marks[1].record()
    loss.backward()
    marks[2].record()
    optimizer.step()
    marks[3].record()
    loss.item()
    steps.append(marks)
    walls.append(1e3 * (time.perf_counter() - begin))
torch.accelerator.synchronize()
found = {name: statistics.median(s[i].elapsed_time(s[i + 1]) for s in steps[5:])
         for i, name in enumerate(("forward", "backward", "optimizer"))}
with open(out, "w") as file:
    json.dump(found | {"wall": statistics.median(walls[5:])}, file)
"""


def measured(check: Check, way: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the milliseconds that a script measures itself, and what ``profile`` reports of it."""
    script, out = check.folder / "train.py", check.folder / f"{way}.json"
    script.write_text(
        SCRIPT.replace("(FORWARD_S)", f"({FORWARD_S})").replace("(BACKWARD_S)", f"({BACKWARD_S})"),
        encoding="utf-8",
    )
    arguments = [str(script), check.kind, way, str(out)]
    subprocess.run([sys.executable, *arguments], check=True, timeout=60)
    profile = [sys.executable, "-m", "backlight", "profile", "--json", *arguments]
    done = subprocess.run(profile, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return json.loads(out.read_text(encoding="utf-8")), json.loads(done.stdout)


def near(check: Check, name: str, figure: float, own: float) -> None:
    """Expect a figure near that of the script; on the simulated device the load of the host decides."""
    holds = abs(figure - own) <= 0.15 * own or check.simulated is not None
    expected = f"{own:.3f} within 15 %, on a GPU"
    check.expect(f"{name}, ms", f"{figure:.3f}", expected, holds=holds)


def main(check: Check) -> None:
    """Compare both scripts."""
    for way in ("launch", "device"):
        own, reported = measured(check, way)
        phases = reported["device_phases"]
        near(check, f"{way}: forward and loss", phases["forward"] + phases.get("loss", 0.0), own["forward"])
        for name in ("backward", "optimizer"):
            near(check, f"{way}: {name}", phases[name], own[name])
        near(check, f"{way}: wall", reported["step"]["median_ms"], own["wall"])
        if check.simulated is not None and way == "device":
            for name, seconds in (("forward", FORWARD_S), ("backward", BACKWARD_S)):
                holds = phases[name] >= 1e3 * seconds
                check.expect(
                    f"{name} of a busy device, ms", f"{phases[name]:.1f}", f"{1e3 * seconds:.0f}", holds=holds
                )
        device = reported["device"]
        if device is None:
            check.leave_out(f"{way}: idle time", f"torch's profiler records no kernels of {check.kind}")
            continue
        check.figure(f"{way}: idle", f"{device['idle']:.0%}; {device['statement']}")
        is_launch_bound = device["launch_bound"]
        check.expect(
            f"{way}: launch-bound",
            is_launch_bound,
            str(way == "launch"),
            holds=is_launch_bound == (way == "launch"),
        )


if __name__ == "__main__":
    Check.run(main, EXPECTED)
