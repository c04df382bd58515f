"""What the hooks add to a step that is not recorded: processor time of the training thread, and bytes.

Blocks of steps with the hooks installed and counting, and without any, alternate in one process; a second
block without hooks is the control. Figures are medians over the rounds of the difference to the block
without hooks. The bytes are those of the loss, a scheduled learning rate and the norm that clipping uses.

    OMP_NUM_THREADS=1 python bench/unrecorded_steps.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import backlight
from backlight.capture.hub import HUB

STEPS = 200
"""Steps of a block."""

STORED_STEPS = 20_000
"""Steps of the run whose bytes are counted."""

WARM_UP = 50
"""Steps before each block, in which a watched run begins to count."""


class Training:
    """A model that is so small that the hooks weigh as much as they can."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(4, 8)

    def steps(self, count: int) -> float:
        """Train; return the processor seconds of this thread per step."""
        begin = time.thread_time()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        return (time.thread_time() - begin) / count


def stored_bytes(run: Path) -> float:
    """Return the bytes per step of what a run stores of the steps that are not recorded."""
    training = Training()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, STORED_STEPS)
    with backlight.watch(training.model, training.optimizer, run=run, every=10**9, summary=False):
        for _ in range(STORED_STEPS):
            training.optimizer.zero_grad()
            training.model(training.x).square().mean().backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            schedule.step()
    with contextlib.closing(sqlite3.connect(run / "attempt-000" / "rank-00000.db")) as database:
        query = "SELECT sum(length(floats) + length(ints) + 40), count(DISTINCT step) FROM scalar"
        ((written, blocks),) = database.execute(query)
    assert blocks >= 3 * STORED_STEPS // 1024, "steps are missing"
    return float(written / STORED_STEPS)


def main() -> None:
    """Print the time of a step, and what is added to it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training()
    taken: dict[str, list[float]] = {"no hooks": [], "control": [], "hooks": []}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with backlight.watch(training.model, training.optimizer, run=run, every=10**9, summary=False):
            training.steps(3000)  # observations of the start are far apart by now
            listeners = HUB.listeners
            for number in range(options.rounds):
                ways = list(taken)
                for way in ways[number % 3 :] + ways[: number % 3]:
                    for listener in listeners:
                        (HUB.add if way == "hooks" else HUB.remove)(listener)
                    while not training.steps(WARM_UP) or ((HUB.unrecorded is None) == (way == "hooks")):
                        pass
                    taken[way].append(training.steps(STEPS))
            for listener in listeners:
                HUB.add(listener)
    plain = taken["no hooks"]
    print(f"a step without hooks: {1e6 * statistics.median(plain):.1f} us")
    for way in ("control", "hooks"):
        added = [1e6 * (one - other) for one, other in zip(taken[way], plain, strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        print(f"added by {way}: {middle:+.1f} us (quartiles {low:+.1f} to {high:+.1f})")
    with tempfile.TemporaryDirectory() as folder:
        print(f"on the disk: {stored_bytes(Path(folder) / 'run'):.1f} bytes per step")
    print(f"load average of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
