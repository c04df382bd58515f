"""Accumulated gradients of microbatches with different numbers of targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from faults.silent.loop import Loop, control, fault, perceptron, train

COUNTS = ((8, 2), (3, 7), (6, 1), (8, 4))
"""Labels of the two microbatches of a step that are not ignored."""


def labelled(counts: tuple[tuple[int, ...], ...]) -> Callable[[int], Iterator[tuple[Tensor, Any]]]:
    """Return data whose targets are labels, and the number of targets of their step."""

    def data(count: int) -> Iterator[tuple[Tensor, Any]]:
        for number in range(count):
            step, place = divmod(number, 2)
            of_step = counts[step % len(counts)]
            labels = torch.randint(0, 3, (8,))
            labels[of_step[place] :] = -100
            yield torch.randn(8, 4), (labels, sum(of_step))

    return data


def accumulate(
    loss_of: Callable[[Tensor, Tensor, int], Tensor],
    counts: tuple[tuple[int, ...], ...] = COUNTS,
    **forced: Any,
) -> None:
    """Train with two microbatches per step; ``loss_of(logits, labels, targets of the step)``."""
    train(
        perceptron(),
        loss_of=lambda out, y: 2 * loss_of(out, *y),  # the loop divides by the number of microbatches
        data=labelled(counts),
        microbatches=2,
        **forced,
    )


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
    accumulate(mean_of_means if injected else mean_of_sums, autocast=True, has_scaler=True)


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


@fault(rule="uneven_microbatches", severity="warning", step=0, names="by 2 twice")
def divided_twice(injected: bool) -> None:
    train(
        perceptron(),
        loss_of=lambda out, y: F.cross_entropy(out, y) / (2 if injected else 1),  # the loop divides as well
        microbatches=2,
    )


@fault(rule="uneven_microbatches", severity="warning", step=0, names="by 2 twice")
def another_loss_divided_twice(injected: bool) -> None:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        loss = (out - F.one_hot(y, 3)).abs().mean()
        return loss / 2 if injected else loss

    train(perceptron(), loss_of=loss_of, microbatches=2)


@control
def half_of_a_loss() -> None:
    train(perceptron(), loss_of=lambda out, y: 0.5 * F.cross_entropy(out, y), microbatches=2)


@control
def divided_by_another_number() -> None:
    train(perceptron(), loss_of=lambda out, y: F.cross_entropy(out, y) / 4, microbatches=2)


@control
def one_of_two_terms_divided() -> None:
    train(
        perceptron(), loss_of=lambda out, y: F.cross_entropy(out, y) / 2 + out.square().mean(), microbatches=2
    )


@fault(
    rule="uneven_microbatches",
    kind="sum_of_means",
    severity="info",
    step=0,
    names="losses of 4 microbatches",
    hidden_by=("clips",),
)
def losses_added_up(injected: bool) -> None:
    factor = 4 if injected else 1  # the loop divides by it
    train(perceptron(), loss_of=lambda out, y: factor * F.cross_entropy(out, y), microbatches=4)


@fault(
    rule="uneven_microbatches",
    kind="sum_of_means",
    severity="info",
    step=0,
    names="losses of 2 microbatches",
    hidden_by=("clips",),
)
def losses_added_up_with_adam(injected: bool) -> None:
    model = perceptron()
    factor = 2 if injected else 1
    train(
        model,
        torch.optim.AdamW(model.parameters()),
        loss_of=lambda out, y: F.nll_loss(F.log_softmax(out, dim=1), y) * factor,
        microbatches=2,
    )


@control
def gradients_divided_by_hand() -> None:
    """The losses are added up, and their gradients divided before the step."""
    model = perceptron()
    loop = Loop(model, loss_of=lambda out, y: 3 * F.cross_entropy(out, y), microbatches=3)

    def divide(_: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3

    loop.before_update = divide
    loop.run()


@control
def two_losses_of_two_lines() -> None:
    """Two tasks on one model, each with a backward of its own."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(10):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(-x), 2 - y).backward()
        optimizer.step()


@control
def sum_over_all_targets() -> None:
    train(
        perceptron(), loss_of=lambda out, y: 2 * F.cross_entropy(out, y, reduction="sum") / 16, microbatches=2
    )
