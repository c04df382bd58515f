"""What watching adds to a training step of the demo model.

Watched and unwatched steps alternate in one process and in blocks, so that a machine whose speed
drifts slows both alike; the figure is the median over pairs of blocks of the ratio of their times.

    OMP_WAIT_POLICY=PASSIVE python bench/overhead.py
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import backlight

EXAMPLE = Path(__file__).parents[1] / "examples" / "char_gpt.py"


def load_example() -> ModuleType:
    """Import the demo's script."""
    spec = importlib.util.spec_from_file_location("char_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_gpt"] = module
    spec.loader.exec_module(module)
    return module


class Training:
    """The demo's model and step, without its data loader."""

    def __init__(self, device: str) -> None:
        example = load_example()
        torch.manual_seed(0)
        self.model = example.CharGPT(96, 128, 128, 4, 5).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1)
        self.inputs = torch.randint(0, 96, (16, 128), device=device)
        self.targets = torch.randint(0, 96, (16, 128), device=device)
        self.device = device

    def steps(self, count: int) -> float:
        """Train ``count`` steps and return their seconds."""
        begin = time.perf_counter()
        for _ in range(count):
            loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def compare(training: Training, pairs: int, block: int, **settings: object) -> list[float]:
    """Return watched over unwatched seconds of ``pairs`` pairs of blocks.

    One watch is kept open over all pairs and only attached to the hub for its blocks, so that its
    start and its end are outside: they are no part of a step.
    """
    from backlight.capture.hub import HUB

    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        watch = backlight.watch(training.model, training.optimizer, run=Path(folder) / "run", **settings)
        watch._cadence.grace = 0.0  # a bench is short: with the grace the budget would never bind
        with watch:
            tracker = watch._tracker
            training.steps(block)
            for number in range(pairs):
                seconds = {}
                for watched in (True, False) if number % 2 else (False, True):
                    (HUB.add if watched else HUB.remove)(tracker)
                    seconds[watched] = training.steps(block)
                ratios.append(seconds[True] / seconds[False])
            HUB.add(tracker)
    return ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--block", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training = Training(options.device)
    step = training.steps(10) / 10
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {options.threads} threads"
    table = Table(title=f"added time of a step of the demo model ({step * 1e3:.1f} ms, {where})")
    for column in ("what is watched", "median added", "quartiles", "pairs"):
        table.add_column(column, justify="left" if column.startswith("what") else "right")
    rows = {
        "nothing (two unwatched blocks)": None,
        "default rooms, cadence by the budget": {},
        "default rooms, every step": {"every": 1},
        "without stalls, every step": {"every": 1, "rooms": "health,steptime"},
        "health alone, every step": {"every": 1, "rooms": "health"},
        "step time alone, every step": {"every": 1, "rooms": "steptime"},
        "every step, with histograms": {"every": 1, "histogram": True},
    }
    for name, settings in rows.items():
        if settings is None:
            ratios = [
                training.steps(options.block) / training.steps(options.block) for _ in range(options.pairs)
            ]
        else:
            ratios = compare(training, options.pairs, options.block, **settings)
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(
            name,
            f"{(middle - 1) * 100:+.2f} %",
            f"{(low - 1) * 100:+.2f} … {(high - 1) * 100:+.2f} %",
            str(len(ratios)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
