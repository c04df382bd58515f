"""What watching adds to a step that keeps a device busy for 10 ms, interleaved.

Run ``python bench/device_overhead.py``, on the simulated accelerator; ``bench/gpu_checks/overlap.py`` is the
same on another device. Blocks of watched and unwatched steps alternate in one process, after the first
steps of the run, which are all recorded. Once the host runs ahead of the device, as in a loop that
reads no value; once it waits for the loss of each step, so that all of its own time shows. The figure is the
median over pairs of neighbouring blocks of the ratio of their times, with quartiles; ``control`` is the same
of two unwatched blocks. It contains the kernels that a recorded step adds, which run on a core of the host.
The aim is 1.01. On two cores that were otherwise idle (24 pairs): 1.006 (quartiles 0.982 to 1.030) where the
host runs ahead and 1.005 (0.997 to 1.049) where it waits, with controls of 1.007 and 1.000; the training
thread computes 0.014 ms more of a step, 0.1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import backlight
from backlight.capture.hub import HUB

BUSY_S, FIRST, BLOCK = 0.010, 150, 40
SETTLE = 3
"""Steps of a block that are not measured: the host gets ahead."""


class Training:
    """A small model whose step keeps the device busy."""

    def __init__(self, device: str, keep_busy: Callable[[float], None]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x, self.y = torch.ones(4, 8, device=device), torch.arange(4, device=device)
        self.keep_busy = keep_busy

    def step(self, *, waits: bool) -> None:
        """Train one step; ``waits``: and read its loss."""
        self.keep_busy(BUSY_S)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        if waits:
            loss.item()

    def block(self, *, waits: bool) -> tuple[float, float]:
        """Return the seconds of a step, and those of them that this thread computes."""
        for _ in range(SETTLE):
            self.step(waits=waits)
        torch.accelerator.synchronize()
        wall, processor = time.perf_counter(), time.thread_time()
        for _ in range(BLOCK):
            self.step(waits=waits)
        processor = time.thread_time() - processor
        torch.accelerator.synchronize()
        return (time.perf_counter() - wall) / BLOCK, processor / BLOCK


def compare(training: Training, pairs: int, *, waits: bool) -> tuple[float, float]:
    """Print the ratios of one kind of loop; return the median of the watched blocks, and of the control."""
    times: dict[str, list[tuple[float, float]]] = {"watched": [], "unwatched": [], "control": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        backlight.watch(
            training.model, training.optimizer, run=Path(folder) / "run", quiet=True, summary=False
        ),
    ):
        for _ in range(FIRST):
            training.step(waits=waits)
        listeners = HUB.listeners
        for number in range(pairs):
            for name in sorted(times, reverse=bool(number % 2)):
                for listener in listeners:
                    (HUB.add if name == "watched" else HUB.remove)(listener)
                times[name].append(training.block(waits=waits))
        for listener in listeners:
            HUB.add(listener)
    medians = []
    print(f"{'the host waits for each loss' if waits else 'the host runs ahead'}, {pairs} pairs")
    for name in ("watched", "control"):
        ratios = [one[0] / other[0] for one, other in zip(times[name], times["unwatched"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians.append(middle)
        host = [1e3 * statistics.median(pair[1] for pair in times[n]) for n in (name, "unwatched")]
        print(
            f"  {name} / unwatched: {middle:.4f} (quartiles {low:.4f} to {high:.4f}); "
            f"this thread computes {host[0]:.3f} ms of a step, unwatched {host[1]:.3f} ms"
        )
    return medians[0], medians[1]


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=24)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "accelerator"))
    import simulated

    training = Training("sim", simulated.sleep)
    for waits in (False, True):
        compare(training, options.pairs, waits=waits)


if __name__ == "__main__":
    main()
