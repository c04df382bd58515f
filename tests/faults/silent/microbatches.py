"""Accumulated gradients of microbatches with different numbers of targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from faults.silent.loop import STEPS, control, fault, perceptron

COUNTS = ((8, 2), (3, 7), (6, 1), (8, 4))
"""Labels of the two microbatches of a step that are not ignored."""


def microbatches(counts: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    for count in counts:
        labels = torch.randint(0, 3, (8,))
        labels[count:] = -100
        yield torch.randn(8, 4), labels


def accumulate(
    loss_of: Callable[[Tensor, Tensor, int], Tensor], counts: tuple[tuple[int, ...], ...] = COUNTS
) -> None:
    """Train with two microbatches per step; ``loss_of(logits, labels, targets of the step)``."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        of_step = counts[step % len(counts)]
        optimizer.zero_grad()
        for x, y in microbatches(of_step):
            loss_of(model(x), y, sum(of_step)).backward()
        optimizer.step()


def mean_of_sums(logits: Tensor, labels: Tensor, targets: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") / targets


def mean_of_means(logits: Tensor, labels: Tensor, _targets: int) -> Tensor:
    return F.cross_entropy(logits, labels) / 2


@fault(rule="uneven_microbatches", severity="warning", step=1, names="step 1: 3, 7")
def mean_of_each_microbatch(injected: bool) -> None:
    accumulate(mean_of_means if injected else mean_of_sums)


@fault(rule="uneven_microbatches", severity="warning", step=1, names="step 1: 3, 7")
def sum_divided_by_its_own_count(injected: bool) -> None:
    def loss_of(logits: Tensor, labels: Tensor, targets: int) -> Tensor:
        count = int((labels >= 0).sum()) if injected else targets
        return F.cross_entropy(logits, labels, reduction="sum") / count

    accumulate(loss_of)


@fault(rule="uneven_microbatches", severity="warning", step=1, names="step 1: 3, 7")
def uneven_under_a_scaler(injected: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        counts = COUNTS[step % len(COUNTS)]
        optimizer.zero_grad()
        for x, y in microbatches(counts):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (mean_of_means if injected else mean_of_sums)(model(x), y, sum(counts))
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@control
def means_weighted_by_their_counts() -> None:
    accumulate(lambda out, y, targets: F.cross_entropy(out, y) * ((y >= 0).sum() / targets))


@control
def equal_microbatches() -> None:
    accumulate(mean_of_means, ((8, 8), (4, 4), (5, 5)))


@control
def two_tasks_in_two_backwards() -> None:
    """A labelled and a larger unlabelled batch, whose weights are chosen."""
    accumulate(mean_of_means, ((2, 8),))


@control
def class_weights() -> None:
    weights = torch.tensor([1.0, 2.0, 5.0])
    accumulate(lambda out, y, _: F.cross_entropy(out, y, weight=weights) / 2, ((8, 8),))
