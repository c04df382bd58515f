"""What a tracker adds to a step: steps of one small model, with each tracker and without, interleaved.

Run ``python bench/trackers.py``. A figure is the median step of a watched run with a tracker over that
of the watched run without one; both record every step. ``none`` is the spread of two equal runs.
The first steps, during which a tracker's package is imported, are listed separately.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import backlight

STEPS, FIRST, ROUNDS = 300, 50, 7


def train(folder: Path, tracker: str) -> tuple[float, float]:
    """Return the median step of the first steps and of the others, in seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(128, 128)
    times = []
    with backlight.watch(
        model,
        optimizer,
        run=folder / "run",
        every=1,
        monitors=("health", "steptime"),
        trackers=[tracker] if tracker else [],
    ):
        for _ in range(STEPS):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[:FIRST]), statistics.median(times[FIRST:])


def main() -> None:
    torch.set_num_threads(1)
    table = Table("tracker", f"first {FIRST} steps", "other steps")
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        trackers = {
            "none": "",
            "tensorboard": f"tensorboard={base / 'tensorboard'}",
            "prometheus": f"prometheus={base / 'x.prom'}",
            "wandb": "wandb",
            "mlflow": f"mlflow={base / 'mlflow'}",
        }
        train(base / "warm", "")
        for tracker, given in trackers.items():
            ratios: list[tuple[float, float]] = []
            for turn in range(ROUNDS):
                alone = train(base / f"{tracker}-{turn}-alone", "")
                sent = train(base / f"{tracker}-{turn}", given)
                ratios.append((sent[0] / alone[0], sent[1] / alone[1]))
            table.add_row(tracker, *(f"{statistics.median(r[i] for r in ratios):.2f} x" for i in (0, 1)))
    Console().print(table)


if __name__ == "__main__":
    main()
