"""Rows of a weight that a mask on gradients is to freeze."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from faults.silent.loop import Loop, control, fault

WORDS, NEW = 40, 8


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


def sentences(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        x = torch.randint(0, WORDS, (32, 6))
        yield x, x[:, 0] % 5


MASK = (torch.arange(WORDS) >= WORDS - NEW).float()[:, None]


def masked(gradient: Tensor) -> Tensor:
    return gradient * MASK


Prepare = Callable[[Sentences, Loop], object]


def train_masked(
    prepare: Prepare, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> None:
    model = Sentences()
    loop = Loop(model, make(model.parameters(), **options), data=sentences)
    prepare(model, loop)
    loop.run()


@fault(rule="trained_tensors", kind="frozen_rows", severity="warning", step=3, names="`embedding.weight`")
def rows_masked_by_a_hook(injected: bool) -> None:
    train_masked(
        lambda model, _: model.embedding.weight.register_hook(masked), weight_decay=0.1 if injected else 0.0
    )


def clears_rows(model: Sentences, loop: Loop) -> None:
    def clear(_: int) -> None:
        assert model.embedding.weight.grad is not None
        model.embedding.weight.grad[: WORDS - NEW] = 0

    loop.before_update = clear


@fault(rule="trained_tensors", kind="frozen_rows", severity="warning", step=4, names="`embedding.weight`")
def rows_of_the_gradient_set_to_zero(injected: bool) -> None:
    train_masked(clears_rows, weight_decay=0.1 if injected else 0.0)


@fault(rule="trained_tensors", kind="frozen_rows", severity="warning", step=3, names="`embedding.weight`")
def rows_masked_after_accumulation(injected: bool) -> None:
    def mask(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(MASK)

    train_masked(
        lambda model, _: model.embedding.weight.register_post_accumulate_grad_hook(mask),
        torch.optim.SGD,
        lr=0.1,
        weight_decay=0.01 if injected else 0.0,
    )


@control
def rows_that_are_written_back() -> None:
    def prepare(model: Sentences, loop: Loop) -> None:
        frozen = model.embedding.weight.detach()[: WORDS - NEW].clone()
        model.embedding.weight.register_hook(masked)
        loop.after_step = lambda _: model.embedding.weight.data[: WORDS - NEW].copy_(frozen)

    train_masked(prepare, weight_decay=0.1)


@control
def words_that_do_not_occur() -> None:
    """A hook scales the gradients; rows of rare words have none and decay."""
    train_masked(
        lambda model, _: model.embedding.weight.register_hook(lambda gradient: 0.5 * gradient),
        weight_decay=0.1,
    )


@control
def rows_that_are_pruned() -> None:
    """What is zero stays zero."""

    def prepare(model: Sentences, loop: Loop) -> None:
        model.embedding.weight.data.mul_(MASK)
        model.embedding.weight.register_hook(masked)

    train_masked(prepare, weight_decay=0.1)


@control
def largest_rows_of_each_gradient() -> None:
    """Gradients are made sparse: other rows at each step."""

    def largest(gradient: Tensor) -> Tensor:
        sizes = gradient.norm(dim=1)
        return gradient * (sizes >= sizes.median())[:, None]

    train_masked(lambda model, _: model.embedding.weight.register_hook(largest), weight_decay=0.1)


@control
def masked_rows_without_decay() -> None:
    train_masked(lambda model, _: model.embedding.weight.register_hook(masked), torch.optim.SGD, lr=0.1)
