"""Two published statements on gradients in training, measured again in small: noise scale, tiny subspace.

McCandlish, Kaplan, Amodei et al., 1812.06162: the gradient noise scale increases as the loss decreases over a
training run. Gur-Ari, Roberts, Dyer, 1812.04754: after a short period of training the gradient lies in the
subspace of a few top eigenvectors of the Hessian, as many as there are classes, which is mostly preserved.

A net 64-16-10 (tanh) learns 512 of scikit-learn's digits by SGD of batch 32 in float64. At each step
shown, of the training samples:

- noise scale of their gradients with its 95 % interval by `backlight.gram`, next to that from a loop over
  single samples;
- squared share of their mean gradient in the top 10 eigenvectors of the Hessian, which is decomposed whole,
  that in the top 10 of the second moment of per-sample gradients by `backlight.gram`, what random directions
  would have, and the overlap of the Hessian's subspace with that at step 200.

    OMP_NUM_THREADS=1 python bench/published_gradients.py
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import backlight

CLASSES, TRAIN = 10, 512
STEPS = (0, 50, 200, 1000, 3000)
REFERENCE = 200

Batch = tuple[Tensor, Tensor]


def summed(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss summed over samples."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def single_gradients(model: nn.Module, batch: Batch) -> Tensor:
    """Return the gradients of single samples ``[N, M]``, one after the other."""
    rows = []
    for n in range(len(batch[0])):
        loss = summed(model, (batch[0][n : n + 1], batch[1][n : n + 1]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def hessian(model: nn.Module, batch: Batch) -> Tensor:
    """Return the Hessian of the mean loss ``[M, M]``."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(values: Tensor) -> Tensor:
        parts = values.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(s) for (name, s), part in zip(shapes.items(), parts, strict=True)}
        out = functional_call(model, named, (batch[0],))
        return functional.cross_entropy(out, batch[1])

    return torch.func.jacrev(torch.func.grad(loss), chunk_size=64)(flat)


def share(directions_kM: Tensor, gradient: Tensor) -> float:
    """Return the squared share of a gradient in the span of orthonormal directions."""
    return float((directions_kM @ gradient).square().sum() / gradient.square().sum())


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    columns = (
        "seed", "step", "loss", "noise scale", "95 %", "by a loop", "top 10 of Hessian", "of second moment",
        "by chance", f"overlap with step {REFERENCE}",
    )  # fmt: skip
    table = Table(title="64-16-10 on digits, SGD, batch 32, rate .1")
    for column in columns:
        table.add_column(column, justify="right")
    for seed in given.seeds:
        torch.manual_seed(seed)
        order = torch.randperm(len(x))
        train = x[order[:TRAIN]], y[order[:TRAIN]]
        model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows, spaces = [], {}
        for step in range(STEPS[-1] + 1):
            if step in STEPS:
                found = backlight.gram(model, summed, train)
                scale = found.noise_scales()["model"]
                G = single_gradients(model, train)
                mean = G.mean(0)
                noise = G.var(0).sum()
                signal = float(mean.square().sum() - noise / TRAIN)
                by_loop = float(noise) / signal if signal > 0 else float("inf")
                vectors = torch.linalg.eigh(hessian(model, train))[1].T[-CLASSES:]
                spaces[step] = vectors
                _, moments = found.eigenvectors(CLASSES)
                of_gram = torch.cat([part.flatten(1) for part in moments.values()], 1)
                loss = float(summed(model, train).detach()) / TRAIN
                rows.append(
                    (step, loss, scale, by_loop, share(vectors, mean), share(of_gram, mean), len(mean))
                )
            batch = torch.randint(0, TRAIN, (32,))
            optimizer.zero_grad()
            (summed(model, (train[0][batch], train[1][batch])) / 32).backward()
            optimizer.step()
        for step, loss, scale, by_loop, top, of_gram, size in rows:
            overlap = float((spaces[step] @ spaces[REFERENCE].T).square().sum()) / CLASSES
            low, high = scale.interval
            table.add_row(
                str(seed), str(step), f"{loss:.3f}", f"{scale.value:.1f}", f"{low:.1f} to {high:.1f}",
                f"{by_loop:.1f}", f"{top:.3f}", f"{of_gram:.3f}", f"{CLASSES / size:.3f}", f"{overlap:.2f}",
            )  # fmt: skip
        table.add_section()
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
