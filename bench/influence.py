"""Influences that a run records, against training again without each sample: three small tasks.

Full-batch gradient descent in float64. A watched run records what each training sample contributes to the
drop of each held-out loss (``influence/pairs``); its sum over the steps is compared with the change of
that loss when the net is trained again without the sample, for every training sample. Correlations are over
the training samples: on the mean held-out loss, and of single held-out samples the quartiles over 16 of them;
"strongest" is how often the training sample with the largest sum is among the three with the largest change.

    OMP_NUM_THREADS=1 python bench/influence.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import backlight
from backlight.monitors.grokking.panels.influence import summed_influences

Batch = tuple[Tensor, Tensor]
WRONG = 4
HELD_OUT = 16


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the losses of single samples."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def squared(model: nn.Module, batch: Batch) -> Tensor:
    """Return the squared errors of single samples."""
    return (model(batch[0]) - batch[1]).square().sum(1)


@dataclass(frozen=True)
class Task:
    """A net, its loss of single samples, training and held-out samples."""

    model: Callable[[], nn.Module]
    losses: Callable[[nn.Module, Batch], Tensor]
    train: Batch
    held_out: Batch
    rate: float


def labelled(x: Tensor, labels: Tensor, count: int) -> tuple[Batch, Batch]:
    """Return training samples, the first with wrong labels, and held-out samples."""
    given = labels[:count].clone()
    given[:WRONG] = (given[:WRONG] + 1) % (int(labels.max()) + 1)
    return (x[:count], given), (x[count : count + HELD_OUT], labels[count : count + HELD_OUT])


def tasks() -> dict[str, Task]:
    """Return clusters, a noisy curve and images of digits."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (200,), generator=draw)
    centres = torch.randn(5, 20, generator=draw)
    x = (centres[labels] + 1.5 * torch.randn(200, 20, generator=draw)).double()
    clusters = labelled(x, labels, 60)
    line = 6 * torch.rand(56, 1, generator=draw).double() - 3
    curve = torch.sin(2 * line) + 0.3 * torch.randn(56, 1, generator=draw).double()
    digits = load_digits()
    images = torch.tensor(digits.images[:200]).unsqueeze(1) / 16
    pictures = labelled(images, torch.tensor(digits.target[:200]), 60)
    return {
        "clusters, 4 wrong labels, MLP": Task(
            lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)),
            cross_entropy, *clusters, 0.05,
        ),
        "noisy curve, MLP": Task(
            lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)),
            squared, (line[:40], curve[:40]), (line[40:], curve[40:]), 0.02,
        ),
        "digits, 4 wrong labels, CNN": Task(
            lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
            cross_entropy, *pictures, 0.05,
        ),
    }  # fmt: skip


def trained(task: Task, steps: int, weights: Tensor, run: Path | None = None) -> np.ndarray:
    """Train on samples with ``weights``, watched where ``run`` is given; return the held-out losses."""
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate)
    watch = None
    if run is not None:
        quiet = dict.fromkeys(("gram", "gradients", "window", "mean_gradient", "vectors", "agop"), 0)
        watch = backlight.watch(
            model, optimizer, run=run, monitors=("grokking",), quiet=True,
            samples=(lambda m, b: task.losses(m, b).sum(), task.train, task.held_out),
            grokking={"every": 1, "influence": 1, **quiet},
        ).start()  # fmt: skip
    for _ in range(steps):
        optimizer.zero_grad()
        (weights * task.losses(model, task.train)).mean().backward()
        optimizer.step()
    if watch is not None:
        watch.stop()
    with torch.no_grad():
        return task.losses(model, task.held_out).numpy()


def compared(task: Task, steps: int, folder: Path) -> tuple[float, np.ndarray, int]:
    """Return the correlation on the mean loss, those on single losses, and hits of the strongest."""
    every = torch.ones(len(task.train[0]), dtype=torch.float64)
    whole = trained(task, steps, every, folder)
    influence = summed_influences(backlight.open_run(folder), "influence/pairs")
    assert influence is not None
    lost = []
    for sample in range(len(every)):
        without = every.clone()
        without[sample] = 0
        lost.append(trained(task, steps, without) - whole)
    lost_NM = np.stack(lost)
    single = np.array([np.corrcoef(influence[:, m], lost_NM[:, m])[0, 1] for m in range(HELD_OUT)])
    strongest = np.abs(influence).argmax(0)
    hits = sum(strongest[m] in np.argsort(-np.abs(lost_NM[:, m]))[:3] for m in range(HELD_OUT))
    return float(np.corrcoef(influence.mean(1), lost_NM.mean(1))[0, 1]), single, hits


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 100])
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="influence over a run, and training again without a sample")
    for column in ("task", "samples", "steps", "mean loss", "single losses", "strongest", "s"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name, task in tasks().items():
        for steps in given.steps:
            begin = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                mean, single, hits = compared(task, steps, Path(folder) / "run")
            low, middle, high = np.quantile(single, [0.25, 0.5, 0.75])
            table.add_row(
                name, str(len(task.train[0])), str(steps), f"{mean:.3f}",
                f"{middle:.3f} ({low:.3f} to {high:.3f})", f"{hits} of {HELD_OUT}",
                f"{time.process_time() - begin:.0f}",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
