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


@fault
def same_ddp() -> Training:
    """Both ranks train on the whole batch."""
    return Training(wrapped(), shares=1, share=0)


@fault
def same_shard() -> Training:
    return Training(sharded(), shares=1, share=0)


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


@fault
def seeded() -> Training:
    """Each rank initialises a layer again after DDP was built."""
    training = Training(wrapped())
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(training.model.module.block.up.weight)
    return training


@fault
def rates() -> Training:
    training = Training(wrapped())
    training.optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    return training


class _Corrupted(Training):
    """One rank receives another sum, once."""

    def loop(self) -> None:
        def hook(_state, bucket):  # type: ignore[no-untyped-def]
            def received(done: Any) -> Any:
                if here(self.step):
                    done.value()[0][:1] += 1e-12
                return done.value()[0] / dist.get_world_size()

            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(received)

        self.step = 0
        self.model.register_comm_hook(None, hook)
        super().loop()

    def before_step(self, step: int) -> None:
        self.step = step + 1


@fault
def corrupted() -> Training:
    return _Corrupted(wrapped())


@fault
def plain() -> Training:
    """Data parallelism by hand; from the sixth step on, rank 1 clips what it has reduced."""

    class ByHand(Training):
        def before_step(self, step: int) -> None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            self.steps += 1
            if self.steps > BAD + 3 and dist.get_rank() == 1:
                nn.utils.clip_grad_norm_(self.model.block.parameters(), 1e-3)

        def loop(self) -> None:
            self.steps = 0
            super().loop()
            super().loop()

    training = ByHand(build())
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    return training


@fault
def local_sgd() -> Training:
    """Ranks that train apart on purpose, and are averaged at every second step."""

    class Averaged(Training):
        def loop(self) -> None:
            for step in range(6):
                self.optimizer.zero_grad()
                tokens, target = (t.chunk(self.shares)[self.share] for t in batch(step))
                with self.model.no_sync():
                    loss_of(self.model(tokens), target).backward()
                self.optimizer.step()
                if step % 2:
                    for parameter in self.model.parameters():
                        dist.all_reduce(parameter.data)
                        parameter.data /= 2

    return Averaged(wrapped())


class _Experts(nn.Module):
    """A router that all ranks hold, and one expert on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = build()
        torch.manual_seed(dist.get_rank())
        self.expert = nn.Linear(11, 11, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.expert(self.inside(tokens))


@fault
def experts() -> Training:
    """Expert parallelism: DDP ignores what lives on one rank."""
    model: Any = _Experts()
    model._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]
    return Training(DistributedDataParallel(model, find_unused_parameters=True))


@fault
def columns() -> Training:
    """Tensor parallelism by hand, with plain tensors of one name on all ranks."""

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8, dtype=torch.float64)
            torch.manual_seed(dist.get_rank())
            self.up = nn.Linear(8, 8, dtype=torch.float64)
            self.down = nn.Linear(8, 4, bias=False, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            hidden.register_hook(lambda grad: (dist.all_reduce(grad := grad.clone()), grad)[1])
            part = self.down(self.up(hidden).relu())
            whole = part.detach().clone()
            dist.all_reduce(whole)
            return part + (whole - part).detach()

    class Loop(Training):
        def loop(self) -> None:
            for step in range(8):
                self.optimizer.zero_grad()
                x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
                (self.model(x) - 1).square().mean().backward()
                self.optimizer.step()

    torch.manual_seed(1)
    return Loop(Columns())


@fault
def uneven() -> Training:
    """Ranks with different numbers of batches, over two epochs."""

    class Uneven(Training):
        def loop(self) -> None:
            for _ in range(2):
                with self.model.join():
                    for step in range(2 + 2 * dist.get_rank()):
                        self.optimizer.zero_grad()
                        tokens, target = (t.chunk(self.shares)[self.share] for t in batch(step))
                        loss_of(self.model(tokens), target).backward()
                        self.optimizer.step()

    model = build(tied=False)
    del model.unused
    return Uneven(DistributedDataParallel(model))


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
