"""Runs on two ranks with an injected fault on one of them; started by torchrun.

torchrun --nproc-per-node 2 faults.py FOLDER FAULT[,FAULT...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import backlight
from backlight.session import rank_norm_monitor
from ranks.network import batch, build, loss_of
from ranks.training_run import FOLDER, Training, report, sharded

FAULTS: dict[str, Callable[[], Training]] = {}
BAD = 2
"""The step of the fault on rank 1."""


def fault(make: Callable[[], Training]) -> Callable[[], Training]:
    FAULTS[make.__name__] = make
    return make


def wrapped(**options: Any) -> Any:
    return DistributedDataParallel(build(), find_unused_parameters=True, **options)


def here(step: int) -> bool:
    return step == BAD and dist.get_rank() == 1


class _BadBatch(Training):
    """The loss of one batch is infinite."""

    def loop(self) -> None:
        for step in range(4):
            self.optimizer.zero_grad()
            tokens, target = (t.chunk(self.shares)[self.share] for t in batch(step))
            loss = loss_of(self.model(tokens), target) * (float("inf") if here(step) else 1.0)
            loss.backward()
            self.optimizer.step()


@fault
def nan_ddp() -> Training:
    return _BadBatch(wrapped())


class _BadShard(Training):
    def before_step(self, step: int) -> None:
        if here(step):
            self.model.block.up.weight.grad.to_local()[0, 0] = float("nan")


@fault
def nan_shard() -> Training:
    return _BadShard(sharded())


class _Skipping(Training):
    """One rank skips a step."""

    def loop(self) -> None:
        for step in range(6):
            self.optimizer.zero_grad()
            tokens, target = (t.chunk(self.shares)[self.share] for t in batch(step))
            loss_of(self.model(tokens), target).backward()
            if not here(step):
                self.optimizer.step()


@fault
def skip_shard() -> Training:
    return _Skipping(sharded())


@fault
def skip_ddp() -> Training:
    return _Skipping(wrapped())


@fault
def unreduced() -> Training:
    """The ranks train independently."""
    return Training(build())


@fault
def nan_unreduced() -> Training:
    return _BadBatch(build())


@fault
def thawed() -> Training:
    """DDP does not reduce a layer that was frozen when DDP was built."""
    model = build()
    model.block.up.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model.block.up.requires_grad_(True)
    return Training(ddp)


class _Moved(Training):
    """One rank changes a weight."""

    def before_step(self, step: int) -> None:
        if dist.get_rank() == 1 and step == 0:
            with torch.no_grad():
                self.model.module.unused.weight.mul_(1.5)


@fault
def moved() -> Training:
    training = _Moved(wrapped())
    nn.init.ones_(training.model.module.unused.weight)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    return training


class _Cut(Training):
    """Tensors of two sizes with one name, as in pipeline stages that number their layers from 0."""

    def loop(self) -> None:
        for step in range(3):
            self.optimizer.zero_grad()
            self.model(torch.full((2, 3 + dist.get_rank()), 1.0 + step)).square().sum().backward()
            self.optimizer.step()


@fault
def cut() -> Training:
    return _Cut(nn.Linear(3 + dist.get_rank(), 2))


@fault
def healthy() -> Training:
    return Training(wrapped())


@fault
def healthy_shard() -> Training:
    return Training(sharded())


def _reduced(training: Training) -> Training:
    training.settings = {"reduce": True}
    return training


@fault
def reduced_shard() -> Training:
    return _reduced(Training(sharded()))


@fault
def reduced_ddp() -> Training:
    return _reduced(Training(wrapped()))


@fault
def reduced_skip() -> Training:
    """Rank 1 sends one step less; rank 0 times out and continues training."""
    rank_norm_monitor.TIMEOUT_S = 3.0
    return _reduced(_Skipping(sharded()))


class _Destroyed(Training):
    """The process group is destroyed during the watch, and each rank continues alone."""

    def loop(self) -> None:
        super().loop()
        if not dist.is_initialized():
            return
        dist.barrier()
        dist.destroy_process_group()
        self.model = self.model.module
        self.shares, self.share = 1, 0
        super().loop()


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[2].split(","):
        if name == "destroyed":
            torch.manual_seed(0)
            training = _Destroyed(wrapped())
            with backlight.watch(training.model, training.optimizer, run=FOLDER / name, every=1):
                training.loop()
            (FOLDER / f"{name}-{training.share}-ended").write_text("")
            return
        report(name, FAULTS[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
