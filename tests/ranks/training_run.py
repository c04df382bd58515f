"""Training setups on several ranks over gloo, each run unwatched and watched; started by torchrun.

    torchrun --nproc-per-node K training_run.py FOLDER SETUP[,SETUP...]

Each setup writes the result of its rank as JSON into FOLDER, and its run into FOLDER/SETUP.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import backlight
from ranks.network import STEPS, adam, batch, build, loss_of

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
SETUPS: dict[str, Callable[[], Training]] = {}


class Training:
    """A model, its optimizer and its loop; ``share`` of ``shares`` is this rank's part of each batch."""

    def __init__(self, model: Any, *, shares: int | None = None, share: int | None = None, micro: int = 1):
        self.model = model
        self.optimizer = adam(model)
        self.shares = dist.get_world_size() if shares is None else shares
        self.share = dist.get_rank() if share is None else share
        self.micro = micro
        self.losses: list[float] = []

    def around(self, step: int, micro: int, last: bool) -> Any:
        """Return the context of a microbatch."""
        return contextlib.nullcontext()

    def before_step(self, step: int) -> None:
        """Hook between backward and the optimizer step."""

    def loop(self) -> None:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            tokens, target = (t.chunk(self.shares)[self.share] for t in batch(step))
            self.losses.append(0.0)
            for m in range(self.micro):
                x, y = (t.chunk(self.micro)[m] for t in (tokens, target))
                with self.around(step, m, m == self.micro - 1):
                    loss = loss_of(self.model(x), y) / self.micro
                    loss.backward()
                self.losses[-1] += loss.item()
            self.before_step(step)
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [_local(p).clone() for p in self.model.parameters()]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def setup(make: Callable[[], Training]) -> Callable[[], Training]:
    SETUPS[make.__name__] = make
    return make


# Replicated


@setup
def ddp() -> Training:
    return Training(DistributedDataParallel(build(), find_unused_parameters=True))


class _Unreduced(Training):
    def around(self, step: int, micro: int, last: bool) -> Any:
        return contextlib.nullcontext() if last else self.model.no_sync()


@setup
def ddp_no_sync() -> Training:
    return _Unreduced(DistributedDataParallel(build(), find_unused_parameters=True), micro=2)


@setup
def ddp_static() -> Training:
    return Training(DistributedDataParallel(build(), static_graph=True, gradient_as_bucket_view=True))


@setup
def ddp_clipped() -> Training:
    """Clipped before the step, after the gradients were measured."""

    class Clipped(Training):
        def before_step(self, step: int) -> None:
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1e30)

    return Clipped(DistributedDataParallel(build(), find_unused_parameters=True))


class _Joined(Training):
    """Rank 1 has one batch less; DDP's join shadows its collectives."""

    def loop(self) -> None:
        with self.model.join():
            for step in range(STEPS - (dist.get_rank() == 1)):
                self.optimizer.zero_grad()
                tokens, target = (t.chunk(self.shares)[self.share] for t in batch(step))
                loss = loss_of(self.model(tokens), target)
                loss.backward()
                self.losses.append(loss.item())
                self.optimizer.step()


@setup
def ddp_join() -> Training:
    return _Joined(DistributedDataParallel(build(), find_unused_parameters=True))


# Sharded


def sharded(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = build(dtype=dtype)
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


@setup
def fsdp() -> Training:
    return Training(sharded())


@setup
def fsdp_float32() -> Training:
    return Training(sharded(torch.float32))


@setup
def fsdp_kept() -> Training:
    """Parameters are not resharded after forward."""
    return Training(sharded(reshard_after_forward=False))


@setup
def fsdp_clipped() -> Training:
    class Clipped(Training):
        def before_step(self, step: int) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e30)

    return Clipped(sharded())


def flattened(dtype: torch.dtype = torch.float64) -> Any:
    model, options = build(dtype=dtype), {"device_id": torch.device("cpu"), "use_orig_params": True}
    model.block = FullyShardedDataParallel(model.block, **options)
    return FullyShardedDataParallel(model, **options)


@setup
def flat() -> Training:
    """FSDP1: flattened parameters cut into equal pieces; some ranks hold no part of a parameter."""
    return Training(flattened())


@setup
def flat_clipped_float32() -> Training:
    """FSDP1 clips by a method of its own, which takes no float64."""

    class Clipped(Training):
        def before_step(self, step: int) -> None:
            self.model.clip_grad_norm_(1e30)

    return Clipped(flattened(torch.float32))


class _Accumulated(Training):
    """Neither reduced nor resharded between microbatches."""

    def around(self, step: int, micro: int, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        self.model.set_is_last_backward(last)
        return contextlib.nullcontext()


@setup
def fsdp_accumulated() -> Training:
    return _Accumulated(sharded(), micro=2)


@setup
def fsdp_whole() -> Training:
    """Parameters are still unsharded when backward ends."""

    class Late(Training):
        def before_step(self, step: int) -> None:
            for module in (self.model, self.model.block):
                module.reshard()

    training = Late(sharded(reshard_after_forward=False))
    training.model.set_reshard_after_backward(False)
    return training


@setup
def hybrid() -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return Training(sharded(mesh=mesh))


# Tensor parallelism


def tensor_parallel(mesh: Any) -> Any:
    model = build(tied=False)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


@setup
def tensor() -> Training:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Training(tensor_parallel(mesh), shares=1, share=0)


@setup
def sequence() -> Training:
    """Sequence parallelism: norm weights are replicated, and their gradients are partial sums."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(tied=False)
    plan = {
        "block": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "block.norm": SequenceParallel(use_local_output=False),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    model.block.register_forward_hook(lambda _m, _a, out: out.full_tensor())
    return Training(model, shares=1, share=0)


@setup
def fsdp_tensor() -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    fully_shard(model.block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return Training(model, shares=2, share=mesh.get_local_rank("data"))


# Pipelines


class _Stage(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        whole = build(tied=False)
        self.first = first
        if first:
            self.embed, self.block = whole.embed, whole.block
        else:
            self.gate, self.head = whole.gate, whole.head

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.embed(x)) if self.first else self.head(x * self.gate.repeat(2))


class _Pipeline(Training):
    schedule: Any = ScheduleGPipe

    def __init__(self) -> None:
        rank = dist.get_rank()
        super().__init__(_Stage(rank == 0), shares=1, share=0)
        self.stage = PipelineStage(self.model, rank, 2, torch.device("cpu"))
        self.schedule = type(self).schedule(self.stage, n_microbatches=4, loss_fn=loss_of)

    def loop(self) -> None:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            tokens, target = batch(step)
            if dist.get_rank() == 0:
                self.schedule.step(tokens)
            else:
                self.schedule.step(target=target)
            self.optimizer.step()


@setup
def pipeline() -> Training:
    return _Pipeline()


@setup
def pipeline_1f1b() -> Training:
    class OneForward(_Pipeline):
        schedule = Schedule1F1B

    return OneForward()


# Running the setups


@contextlib.contextmanager
def backlight_warnings() -> Iterator[list[str]]:
    """Store the warnings."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages.extend(str(w.message) for w in caught if "backlight" in str(w.message))


def collectives() -> int:
    """Return the number of collectives that this rank has started in all groups."""
    return sum(group._get_sequence_number_for_group() for group in _world.pg_map)


def report(name: str, make: Callable[[], Training]) -> None:
    """Run a setup unwatched and watched, and write the differences."""
    torch.manual_seed(0)
    plain = make()
    counts = [collectives()]
    plain.loop()
    counts.append(collectives())
    torch.manual_seed(0)
    training = make()
    counts.append(collectives())
    options = {"every": 1, "health": {"exact_updates": 1}}
    with (
        backlight_warnings() as messages,
        backlight.watch(training.model, training.optimizer, run=FOLDER / name, **options),
    ):
        training.loop()
    counts.append(collectives())
    pairs = list(zip(plain.weights(), training.weights(), strict=True))
    result = {
        "same": bool(pairs) and all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs),
        "warnings": messages,
        "losses": training.losses,
        "collectives": [counts[1] - counts[0], counts[3] - counts[2]],
    }
    (FOLDER / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[2].split(","):
        report(name, SETUPS[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
