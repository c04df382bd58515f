"""What watching adds to a step that keeps a device busy for 10 ms, on the simulated accelerator, interleaved.

Run ``python bench/device_overhead.py``. The figure is the mean step of a watched run over that of an
unwatched run, after the first steps. It contains the kernels that watching adds, which run on a core of the
host here.
``control`` is the spread of two unwatched runs. The aim is 1.01; on two busy cores it was 1.039 (1.014 to
1.061), with a control of 1.000 (0.990 to 1.003).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "accelerator"))

import simulated
import torch
import torch.nn.functional as F
from torch import nn

import backlight

BUSY_S, FIRST, STEPS, ROUNDS = 0.010, 150, 150, 3


def seconds(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Return the mean seconds of a step."""
    x, y = torch.ones(4, 8, device="sim"), torch.arange(4, device="sim")
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        simulated.sleep(BUSY_S)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / steps


def train(*, watched: bool) -> float:
    """Return the mean seconds of the steps after the first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not watched:
        seconds(model, optimizer, FIRST)
        return seconds(model, optimizer, STEPS)
    with (
        tempfile.TemporaryDirectory() as folder,
        backlight.watch(model, optimizer, run=Path(folder) / "run", quiet=True, summary=False),
    ):
        seconds(model, optimizer, FIRST)
        return seconds(model, optimizer, STEPS)


def main() -> None:
    ratios, controls = [], []
    train(watched=True)
    for _ in range(ROUNDS):
        before, watched, after = train(watched=False), train(watched=True), train(watched=False)
        ratios.append(2 * watched / (before + after))
        controls.append(after / before)
    for name, values in (("watched / unwatched", ratios), ("control", controls)):
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
