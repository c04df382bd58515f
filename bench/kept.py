"""What "From spectra to action" predicts, against the true gradient and longer training: two language models.

A GPT of one block and a perceptron over 8 bytes learn source text by Adam. One accumulating step of 32
microbatches is then watched, whose panel states for each matrix the squared cosine between its gradient and
what is made of one replicate: as it is, at its best rank, orthogonal. That is compared with

- the gradient of 96 other microbatches, and 24 further replicates (largest difference over matrices);
- steps of equal length in each matrix (.2 % of its norm) in each of the three ways, other parameters fixed:
  the drop of the loss that is predicted to first order, the mean drop of one step over 24 replicates, and
  what microbatches one after another reach in longer training.

    OMP_NUM_THREADS=1 python bench/kept.py
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import backlight
from backlight.monitors.spectra.model.echo_records import layer_histories
from backlight.monitors.spectra.model.kept import Kept, kept_of
from backlight.store.spectra import tables

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt_recipe as recipe

Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]
WAYS = ("as it is", "best rank", "orthogonal")
LENGTH = 2e-3
CONTEXT = 8
REPLICATES = 32


class Perceptron(nn.Module):
    """Logits of the next byte from the 8 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 16)
        self.hidden, self.head = nn.Linear(16 * CONTEXT, 64), nn.Linear(64, 256)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits ``[N, T, 256]`` of positions that have a whole context, zeros before."""
        windows = functional.pad(codes, (CONTEXT - 1, 0)).unfold(1, CONTEXT, 1)
        return self.head(torch.relu(self.hidden(self.token(windows).flatten(2))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT, one block of 32": lambda: recipe.build_model(dim=32, heads=2, n_blocks=1),
    "perceptron, 64 units": Perceptron,
}


def gradients(model: nn.Module, data: Iterator[object], count: int, names: Sequence[str]) -> Gradients:
    """Return the mean gradients of ``count`` microbatches in float64."""
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameters[name], dtype=torch.float64) for name in names}
    for batch in itertools.islice(data, count):
        found = torch.autograd.grad(recipe.loss(model, batch), [parameters[name] for name in names])
        for name, gradient in zip(names, found, strict=True):
            total[name] += gradient.double() / count
    return total


def made(gradient: Tensor, way: str, rank: int) -> Tensor:
    """Return what an optimizer makes of a gradient."""
    if way == "as it is":
        return gradient
    U, s, Vh = torch.linalg.svd(gradient, full_matrices=False)
    return (U[:, :rank] * s[:rank]) @ Vh[:rank] if way == "best rank" else U @ Vh


def predicted(row: Kept, way: str) -> float:
    """Return the squared cosine that the panel states."""
    return dict(zip(WAYS, (row.whole, row.ranked, row.orthogonal), strict=True))[way]


@torch.no_grad()
def step(model: nn.Module, of: Gradients, rows: Sequence[Kept], way: str) -> None:
    """Step against gradients made in a way, the same length in each matrix."""
    parameters = dict(model.named_parameters())
    for row in rows:
        W, update = parameters[row.layer], made(of[row.layer], way, row.rank)
        W -= (LENGTH * W.norm() / update.norm() * update).to(W.dtype)


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Sequence[object]) -> float:
    """Return the mean loss of microbatches that nothing else sees."""
    return sum(float(recipe.loss(model, batch)) for batch in batches) / len(batches)


def measured(model: nn.Module, data: Iterator[object]) -> tuple[Kept, ...]:
    """Return what the panel states of a step of many microbatches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with backlight.watch(
            model, optimizer, run=run, monitors=("spectra",), every=1, quiet=True, spectra={"timeout": 300.0}
        ):
            optimizer.zero_grad()
            for _ in range(REPLICATES):
                recipe.loss(model, next(data)).backward()
            optimizer.step()
        opened = backlight.open_run(run)
        histories = layer_histories(opened)
        return kept_of(histories, [tables(opened, history.layer.parameter) for history in histories])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-up", type=int, nargs="+", default=[20, 300])
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="drop of the loss by steps of equal length")
    for column in (
        "model",
        "after",
        "matrices",
        "way",
        "largest off",
        "predicted",
        "one step",
        f"{given.steps} steps",
    ):
        table.add_column(column, justify="left" if column in {"model", "way"} else "right")
    for (name, make), warm_up in itertools.product(MODELS.items(), given.warm_up):
        torch.manual_seed(0)
        model = make()
        data = recipe.batches(rank=0, world_size=1, batch=8)
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for batch in itertools.islice(data, warm_up):
            adam.zero_grad()
            recipe.loss(model, batch).backward()
            adam.step()
        rows = measured(model, data)
        if not rows:
            table.add_row(name, str(warm_up), "none shows signal")
            continue
        names = [row.layer for row in rows]
        G = gradients(model, data, 96, names)
        held_out = list(itertools.islice(data, 48))
        replicates = [gradients(model, data, 1, names) for _ in range(24)]
        stream = list(itertools.islice(data, given.steps))
        before = held_out_loss(model, held_out)
        sizes = {n: float(p.detach().norm()) for n, p in model.named_parameters() if p.dim() == 2}
        for way in WAYS:
            off, expected = 0.0, 0.0
            for row in rows:
                true = G[row.layer]
                updates = [made(of[row.layer], way, row.rank) for of in replicates]
                cosines = [float((u * true).sum() / (u.norm() * true.norm())) for u in updates]
                off = max(off, abs((sum(cosines) / len(cosines)) ** 2 - predicted(row, way)))
                expected += LENGTH * sizes[row.layer] * float(true.norm()) * predicted(row, way) ** 0.5
            drops = []
            for of in replicates:
                moved = copy.deepcopy(model)
                step(moved, of, rows, way)
                drops.append(before - held_out_loss(moved, held_out))
            longer = copy.deepcopy(model)
            for batch in stream:
                step(longer, gradients(longer, iter([batch]), 1, names), rows, way)
            table.add_row(
                name, str(warm_up), f"{len(rows)} of {len(sizes)}",
                way, f"{off:.3f}", f"{expected:.4f}", f"{sum(drops) / len(drops):.4f}",
                f"{before - held_out_loss(longer, held_out):.3f}",
            )  # fmt: skip
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
