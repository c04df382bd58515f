"""What a measured step of the monitor spectra costs a training run: on its path, and on the worker thread.

Measured and other steps of one watched run alternate, so that a machine whose speed drifts slows both
equally. On the path: processor seconds of the training thread in a measured step over those in the step
after it, median and quartiles over pairs. On the worker thread: processor seconds of the thread that
decomposes, over those of a step that is not measured.

    OMP_NUM_THREADS=1 python bench/spectra_training.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import backlight

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt_recipe as recipe


def measured(pairs: int, micro: int, batch: int) -> tuple[list[float], float, int]:
    """Return ratios of neighbouring steps, the share of the worker thread, and the matrices measured."""
    model = recipe.build_model()
    optimizer = recipe.build_optimizer(model)
    data = recipe.batches(rank=0, world_size=1, batch=batch)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with backlight.watch(
            model, optimizer, run=run, monitors=("spectra",), every=2, spectra={"timeout": 600.0}
        ) as watch:
            for _ in range(2 * pairs + 2):
                begin = time.thread_time()
                optimizer.zero_grad()
                for _ in range(micro):
                    (recipe.loss(model, next(data)) / micro).backward()
                optimizer.step()
                seconds.append(time.thread_time() - begin)
                # A step that is passed over would be no pair: the worker thread runs here.
                while any(one.name == "spectra" and one._worker.busy(2**60) for one in watch.monitors):
                    time.sleep(0.01)
        costs = [event.payload for event in backlight.open_run(run).events("spectra_cost")]
    steps = np.asarray(seconds[2:]).reshape(-1, 2)
    worker = statistics.median(cost["processor_seconds"] for cost in costs[1:])
    return list(steps[:, 0] / steps[:, 1]), worker / float(np.median(steps[:, 1])), costs[-1]["layers"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="a measured step over one that is not")
    for column in ("microbatches", "matrices", "on the path", "quartiles", "worker"):
        table.add_column(column, justify="right")
    for micro in (4, 16):
        ratios, worker, layers = measured(asked.pairs, micro, asked.batch)
        low, high = np.quantile(ratios, [0.25, 0.75])
        table.add_row(
            str(micro),
            str(layers),
            f"{statistics.median(ratios):.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{worker:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
