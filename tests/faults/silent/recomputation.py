"""Checkpointed regions whose recomputation is not that of their forward."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from faults.silent.loop import Loop, control, fault, train

HERE = "tests/faults/silent/recomputation.py:"


def checkpoint(*args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    # Looked up at the call, as a script does that imports it later.
    return torch.utils.checkpoint.checkpoint(*args, use_reentrant=use_reentrant, **options)


@fault(rule="recomputation_differs", severity="error", step=0, names=HERE)
def recomputed_with_another_dropout(injected: bool) -> None:
    train_checkpointed(nn.Dropout(0.1), preserves=not injected)


@control
def recomputed_without_random_numbers() -> None:
    train_checkpointed(nn.Tanh(), preserves=False)


def train_checkpointed(last: nn.Module, *, preserves: bool) -> None:
    body, head = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), last), nn.Linear(16, 3)

    def forward(x: Tensor) -> Tensor:
        return head(checkpoint(body, x, preserve_rng_state=preserves))

    # torch.compile does not preserve the random state by the same means.
    train(forward, parts=(body, head), is_compiled=False)


class Block(nn.Module):
    """A residual block; ``calls`` counts its runs, ``state`` are its running statistics, if any."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), nn.Sequential(*between)
        self.calls, self.changes = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = 3.0 if self.changes and self.calls % 2 else 1.0
        return x + self.second(self.between(torch.tanh(self.first(x) * scale)))


class Blocks(nn.Module):
    """Three blocks, each of which ``run(blocks, number, x)`` computes."""

    def __init__(self, run: Callable[[nn.ModuleList, int, Tensor], Tensor], *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head, self.run = nn.Linear(4, 16), nn.Linear(16, 3), run
        self.blocks = nn.ModuleList(blocks or (Block(), Block(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for number in range(len(self.blocks)):
            x = self.run(self.blocks, number, x)
        return self.head(x)


class LateBlocks(Blocks):
    """Calls ``checkpoint`` in the loop over the blocks."""

    def __init__(self, *blocks: nn.Module, is_late: bool, **options: Any) -> None:
        super().__init__(lambda *_: torch.empty(0), *blocks)
        self.is_late, self.options = is_late, options

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            if self.is_late:
                x = checkpoint(lambda y: block(y), x, **self.options)  # noqa: B023, PLW0108 - the error
            else:
                x = checkpoint(lambda y, block=block: block(y), x, **self.options)
        return self.head(x)


TEXT = "blocks.2, forward ran "


@fault(rule="recomputation_differs", severity="error", step=0, names=TEXT)
def late_bound_variable(injected: bool) -> None:
    # torch.compile calls the function when it traces, where the variable is right.
    train(LateBlocks(is_late=injected), is_compiled=False)


@fault(rule="recomputation_differs", severity="error", step=0, names=TEXT)
def late_bound_variable_of_a_reentrant_region(injected: bool) -> None:
    train(LateBlocks(is_late=injected, use_reentrant=True), is_compiled=False)


@fault(rule="recomputation_differs", severity="error", step=0, names=TEXT)
def late_bound_variable_without_random_state(injected: bool) -> None:
    train(LateBlocks(is_late=injected, preserve_rng_state=False), is_compiled=False)


@fault(rule="recomputation_differs", severity="error", step=0, names=TEXT)
def late_bound_compiled_block(injected: bool) -> None:
    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)]
    for block in blocks:
        block.compile(backend="aot_eager")
    train(LateBlocks(*blocks, is_late=injected), is_compiled=False, microbatches=1, evaluates=False)


@fault(rule="recomputation_differs", severity="error", step=0, names=TEXT)
def late_bound_index(injected: bool) -> None:
    numbers = [0]

    def run(blocks: nn.ModuleList, number: int, x: Tensor) -> Tensor:
        numbers[0] = number
        return checkpoint(lambda y: blocks[numbers[0] if injected else number](y), x)  # noqa: PLW0108

    train(Blocks(run), is_compiled=False)


@fault(rule="recomputation_differs", severity="error", step=0, names="blocks.0.calls was 0 in forward")
def counter_in_a_block(injected: bool) -> None:
    train_counting(injected, use_reentrant=False)


@fault(rule="recomputation_differs", severity="error", step=0, names="blocks.0.calls was 0 in forward")
def counter_in_a_reentrant_block(injected: bool) -> None:
    train_counting(injected, use_reentrant=True)


def train_counting(injected: bool, **options: Any) -> None:
    model = LateBlocks(is_late=False, **options)
    for block in model.blocks:
        block.changes = injected
    train(model, is_compiled=False, evaluates=False, microbatches=1)


@fault(rule="recomputation_differs", severity="error", step=0, names="region 1")
def stochastic_depth_by_the_random_module(injected: bool) -> None:
    def run(blocks: nn.ModuleList, number: int, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            scale = random.random() if injected else 1.0
            return blocks[number](y * scale)

        return checkpoint(region, x)

    train(Blocks(run), is_compiled=False)


@control
def recomputed_with_running_statistics() -> None:
    train(LateBlocks(*(Block(nn.BatchNorm1d(16)) for _ in range(3)), is_late=False))


@control
def recomputed_with_preserved_dropout() -> None:
    for use_reentrant in (False, True):
        model = LateBlocks(
            *(Block(nn.Dropout(0.5)) for _ in range(3)), is_late=False, use_reentrant=use_reentrant
        )
        train(model, is_compiled=False)


@control
def recomputed_with_a_counter_that_changes_nothing() -> None:
    calls = itertools.count()

    def run(blocks: nn.ModuleList, number: int, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            next(calls)
            return blocks[number](y)

        return checkpoint(region, x)

    train(Blocks(run), is_compiled=False)


@control
def recomputed_one_block_for_all() -> None:
    """Weights that all regions share, and a late-bound variable that is the same block."""

    def run(blocks: nn.ModuleList, _number: int, x: Tensor) -> Tensor:
        for block in [blocks[0]] * 3:
            x = checkpoint(lambda y: block(y), x)  # noqa: B023, PLW0108
        return x

    train(Blocks(run, Block()), is_compiled=False)


@control
def recomputed_selectively_and_nested() -> None:
    def keep(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        saves = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    train(LateBlocks(is_late=False, context_fn=contexts), is_compiled=False)

    def run(blocks: nn.ModuleList, number: int, x: Tensor) -> Tensor:
        inner = functools.partial(checkpoint, blocks[number])
        return checkpoint(inner, x, use_reentrant=bool(number % 2))

    train(Blocks(run), is_compiled=False)


@control
def recomputed_in_segments_and_twice() -> None:
    """``checkpoint_sequential``, and a graph that is kept for a second backward."""
    body, head = nn.Sequential(nn.Linear(4, 16), *(Block() for _ in range(4))), nn.Linear(16, 3)

    def forward(x: Tensor) -> Tensor:
        return head(torch.utils.checkpoint.checkpoint_sequential(body, 2, x, use_reentrant=False))

    loop = Loop(forward, parts=(body, head), is_compiled=False)
    once = loop.backward
    loop.backward = lambda loss: (  # type: ignore[method-assign]
        loop.scaler.scale(loss / 2).backward(retain_graph=True),
        once(loss / 2),
    )
    loop.run()
