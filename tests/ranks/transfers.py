"""Transfers between three ranks over a link that changes data; started by torchrun.

    torchrun --nproc-per-node 3 transfers.py FOLDER

Each loop runs over a sound link, into FOLDER/NAME-control, and over one that flips a bit of what the last
rank gets by the method of the loop, into FOLDER/NAME.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import backlight

LOOPS: dict[str, Callable[[Tensor, int], object]] = {}
"""What a loop transfers after each backward, given a tensor of this rank and the step."""

BEGIN, STEPS = 2, 6
"""First step at which the link changes data, and all steps."""


class Link:
    """Flips a bit of what the last rank gets by ``method``, beneath whatever watches process groups."""

    method = ""
    step = 0
    sent: Any = None

    def install(self, method: str) -> None:
        # Releases without a method of this name call the older one.
        called = method if method in vars(dist.ProcessGroup) else "alltoall_base"
        original = vars(dist.ProcessGroup)[called]

        def call(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            is_bad = self.method == method and self.step >= BEGIN
            if method == "send" and is_bad and args[0] == 2:
                self.sent = tensors = [tensors[0].clone()]
                flip(tensors)
            work = original(group, tensors, *args, **kwargs)
            if method != "send" and is_bad and dist.get_rank() == 2:
                work.wait()
                flip(tensors)
            return work

        setattr(dist.ProcessGroup, called, call)


def flip(tensors: Any) -> None:
    """Change one bit, without an operation of torch."""
    while not isinstance(tensors, Tensor):
        tensors = tensors[0]
    tensors.detach().numpy().reshape(-1).view(np.uint8)[2] ^= 16


LINK = Link()


def loop(transfer: Callable[[Tensor, int], object]) -> Callable[[Tensor, int], object]:
    LOOPS[transfer.__name__] = transfer
    return transfer


@loop
def allreduce(x: Tensor, step: int) -> None:
    dist.all_reduce(x)


@loop
def broadcast(x: Tensor, step: int) -> None:
    work = dist.broadcast(x, 0, async_op=True)
    assert work is not None
    work.wait()


@loop
def allgather(x: Tensor, step: int) -> None:
    dist.all_gather([torch.empty_like(x) for _ in range(3)], x)


@loop
def send(x: Tensor, step: int) -> None:
    """A pipeline of three stages with two microbatches."""
    for _ in range(2):
        if dist.get_rank():
            dist.recv(x, dist.get_rank() - 1)
        x = x * 1.5
        if dist.get_rank() < 2:
            dist.send(x, dist.get_rank() + 1)


@loop
def alltoall(x: Tensor, step: int) -> None:
    pieces = [x * (step + rank) for rank in range(3)]
    dist.all_to_all([torch.empty_like(x) for _ in range(3)], pieces)


@loop
def all_to_all_single(x: Tensor, step: int) -> None:
    dist.all_to_all_single(torch.empty(12), torch.cat([x, 2 * x, 3 * x]))


@loop
def scatter(x: Tensor, step: int) -> None:
    dist.scatter(x, [x * rank for rank in range(3)] if dist.get_rank() == 0 else None)


@loop
def gather(x: Tensor, step: int) -> None:
    dist.gather(x, [torch.empty_like(x) for _ in range(3)] if dist.get_rank() == 2 else None, 2)


@loop
def sound(x: Tensor, step: int) -> None:
    """Results that differ on purpose, or are changed as soon as they are there."""
    rank = dist.get_rank()
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, x.repeat(2)[:6].contiguous())
    dist.all_reduce(x[: 4 + rank // 2].clone(), group=PAIRS[rank // 2])
    dist.reduce(x.clone(), 1)
    dist.gather(x, [torch.empty_like(x) for _ in range(3)] if rank == 0 else None)
    everything: list[Any] = [None] * 3
    dist.all_gather_object(everything, {"step": step, "rank": rank})
    work = dist.all_reduce(x, async_op=True)
    work.get_future().wait()
    x.mul_(rank)
    work.wait()
    everyone = torch.arange(3.0 * (rank + 1)) + step
    dist.all_to_all_single(torch.empty(6), everyone, [1, 2, 3], [rank + 1] * 3)
    ring = [
        dist.P2POp(dist.isend, x, (rank + 1) % 3),
        dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % 3),
    ]
    for request in dist.batch_isend_irecv(ring):
        request.wait()
    dist.all_reduce(x.log())  # not finite
    if step % 2 == rank % 2:
        dist.broadcast(torch.ones(3, dtype=torch.bool), rank, group=ALONE[rank])


PAIRS: list[Any] = []
ALONE: list[Any] = []


def train(transfer: Callable[[Tensor, int], object]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for LINK.step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        transfer(model.weight.grad[0].clone(), LINK.step)
        optimizer.step()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    PAIRS[:] = [dist.new_group([0, 1]), dist.new_group([2])]
    ALONE[:] = [dist.new_group([rank]) for rank in range(3)]
    try:
        dist.all_to_all([torch.empty(1) for _ in range(3)], [torch.ones(1) for _ in range(3)])
    except RuntimeError as error:  # gloo of older releases of torch
        if "does not support alltoall" not in str(error):
            raise
        del LOOPS["alltoall"]
        (folder / "unsupported").write_text("alltoall")
    for method in LOOPS:
        if method != "sound":
            LINK.install(method)
    for name, transfer in LOOPS.items():
        for LINK.method in ("", name):
            run = folder / (name if LINK.method else f"{name}-control")
            with backlight.watch(run=run, monitors=("correctness",), every=1, quiet=True):
                train(transfer)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
