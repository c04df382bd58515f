"""Which training samples carry a drop of the test loss, and whether leaving one out shows the same.

A small net learns five clusters by full-batch gradient descent; a few training labels are wrong. The run
records the influence of each training sample on the test loss. Then the net is trained again without each
of the samples with the largest influences: by how much the test loss changes is the truth.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import backlight

CLASSES, WRONG, LISTED = 5, 4, 16

Batch = tuple[Tensor, Tensor]


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss summed over the samples."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def data() -> tuple[Batch, Batch]:
    """Return training and test samples of five clusters; the first training labels are wrong."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 20, generator=draw)
    labels = torch.randint(0, CLASSES, (500,), generator=draw)
    x = centres[labels] + 1.5 * torch.randn(500, 20, generator=draw)
    given = labels[:100].clone()
    given[:WRONG] = (given[:WRONG] + 1) % CLASSES
    return (x[:100], given), (x[100:], labels[100:])


def train(weights: Tensor, steps: int, rate: float, run: str | None = None) -> float:
    """Train on samples with ``weights``, watched where ``run`` is given, and return the mean test loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    batch, held_out = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    watch = None
    if run is not None:
        measures = {"every": 1, "influence": 1, "ntk": 10, "gram": 10, "gradients": 0, "window": 0}
        samples = summed_loss, batch, held_out
        watch = backlight.watch(
            model, optimizer, run=run, monitors=("grokking",), samples=samples, grokking=measures, quiet=True
        ).start()
    for _ in range(steps):
        optimizer.zero_grad()
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        (weights * losses).mean().backward()
        optimizer.step()
    if watch is not None:
        watch.stop()
    with torch.no_grad():
        return float(summed_loss(model, held_out)) / len(held_out[0])


def main() -> None:
    """Train, watch, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/influence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.05)
    given = parser.parse_args()
    every = torch.ones(len(data()[0][0]))
    whole = train(every, given.steps, given.rate, given.run)
    steps, values = backlight.open_run(given.run).array("influence/samples")
    influence = np.trapezoid(np.stack(values), steps, axis=0)
    order = np.argsort(-influence)
    shown = [*order[: LISTED // 2], *order[-LISTED // 2 :]]
    lost = []
    print("sample  influence  test loss without it")
    for sample in shown:
        weights = every.clone()
        weights[sample] = 0
        lost.append(train(weights, given.steps, given.rate) - whole)
        note = "  wrong label" if sample < WRONG else ""
        print(f"{sample:6}  {influence[sample]:+9.5f}  {lost[-1]:+9.5f}{note}")
    print(f"correlation with leaving a sample out: {np.corrcoef(influence[shown], lost)[0, 1]:.3f}")


if __name__ == "__main__":
    main()
