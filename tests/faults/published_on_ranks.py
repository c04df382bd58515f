"""Small ports of the silent errors of TrainCheck (OSDI 2025) that need two ranks; started by torchrun.

    torchrun --nproc-per-node 2 published_on_ranks.py FOLDER CASE[,CASE...]

Each case is trained with and without its error, watched, into FOLDER/CASE and FOLDER/CASE-control. Those of
one process are in ``tests/faults/silent/published_cases.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import backlight
from faults.injection import Fault, registrar

CASES: dict[str, Fault] = {}
"""Ports by the name of their function; ``case`` is the public id."""

port = registrar(CASES)

STEPS = 10
LOST = 2
"""The first step at which a transfer loses data."""

CLIPPED = 3
"""The first step whose gradients exceed the limit of clipping."""


def perceptron() -> nn.Sequential:
    """Return a model with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def batches(*, same: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of this rank, or the same ones on all ranks."""
    own = torch.Generator().manual_seed(100 if same else 100 + dist.get_rank())
    for _ in range(STEPS):
        yield torch.randn(8, 4, generator=own), torch.randint(0, 3, (8,), generator=own)


def fit(model: nn.Module, before_step: Callable[[int], object] = lambda _: None) -> None:
    """Train a classifier on the batches of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before_step(step)
        optimizer.step()


# Data parallelism


@port(case="x-jxmnop-ddp-out-of-sync", rule="replicas_differ", severity="error")
def wrapper_is_bypassed(injected: bool) -> None:
    """The loop calls the module inside of DDP, so that gradients are not averaged."""
    ddp = DistributedDataParallel(perceptron())
    fit(ddp.module if injected else ddp)


@port(case="pytorch-104336", rule="replicas_differ", severity="error")
def model_converted_after_it_was_wrapped(injected: bool) -> None:
    """A round trip to another type or device replaces the graph nodes that DDP's hooks are attached to."""
    ddp = DistributedDataParallel(perceptron())
    if injected:
        ddp.double().float()
    fit(ddp)


@port(case="pytorch-84803", rule="replicas_differ", severity="error", begins=LOST)
def all_reduce_loses_data_on_one_rank(injected: bool) -> None:
    """A faulty link between two cards: one of them gets zeros in place of some of the averaged gradients."""
    reductions = itertools.count()

    def arrived(future: Any) -> Tensor:
        result = future.value()[0] / dist.get_world_size()
        if injected and dist.get_rank() == 1 and next(reductions) >= LOST:
            result[: len(result) // 2] = 0
        return result

    def reduced(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(arrived)

    ddp = DistributedDataParallel(perceptron())
    ddp.register_comm_hook(None, reduced)
    fit(ddp)


@port(case="pytorch-96600", rule="replicas_differ", severity="error")
def copy_of_the_weights_loses_data(injected: bool) -> None:
    """The weights that one card gets from the other are not those that were sent."""
    ddp = DistributedDataParallel(perceptron())
    if injected and dist.get_rank() == 1:
        with torch.no_grad():
            ddp.module[3].weight[:2] = 0
    fit(ddp)


# Model parallelism


class SplitLinears(nn.Module):
    """Two linear layers of which each rank holds a half, after a norm that all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        whole = nn.Linear(4, 16), nn.Linear(16, 3)
        half = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 3, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(whole[0].weight[half])
            self.up.bias.zero_()
            self.down.weight.copy_(whole[1].weight[:, half])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = _Shared.apply(x)
        return _Summed.apply(self.down(F.relu(self.up(x))))


class _Shared(torch.autograd.Function):
    """The input of split layers: its gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    """The output of split layers: a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


@port(case="deepspeed-1801", rule="replicas_differ", severity="warning", names="norm.", begins=CLIPPED)
def replicated_norm_clipped_on_one_rank(injected: bool) -> None:
    """Only the first rank of a tensor-parallel group clips the gradients of the weights that all hold."""
    model = SplitLinears()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(same=True)):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (20 if step >= CLIPPED else 1)).backward()
        # The norm over all ranks: replicated weights count once.
        squares = sum(p.grad.square().sum() for n, p in model.named_parameters() if not n.startswith("norm"))
        dist.all_reduce(squares)
        squares = squares + sum(p.grad.square().sum() for p in model.norm.parameters())
        factor = (4.0 / squares.sqrt()).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            if not (injected and name.startswith("norm") and dist.get_rank()):
                parameter.grad.mul_(factor)
        optimizer.step()


class Link:
    """The way that data takes from card to card, beneath whatever watches process groups."""

    loses = False

    def install(self) -> None:
        """Let it lose the second half of each row that is sent."""
        sent = vars(dist.ProcessGroup)["send"]
        lost = []

        def send(group: Any, tensors: list[Tensor], *args: Any) -> Any:
            if self.loses:
                lost.append(tensors[0] * (torch.arange(tensors[0].shape[1]) < 8))
            return sent(group, lost[-1:] if self.loses else tensors, *args)

        dist.ProcessGroup.send = send  # type: ignore[method-assign]


LINK = Link()


@port(case="baichuan2-86", rule="replicas_differ", severity="error", names="Rank 1 received")
def activations_lose_data_between_stages(injected: bool) -> None:
    """A model split over two cards: what the second stage gets is not what the first one sent."""
    torch.manual_seed(dist.get_rank())
    stage = nn.Linear(4, 16) if dist.get_rank() == 0 else nn.Linear(16, 3)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for x, y in batches(same=True):
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            hidden = stage(x).relu()
            LINK.loses = injected
            dist.send(hidden.detach(), 1)
            LINK.loses = False
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(8, 16)
            dist.recv(hidden, 0)
            F.cross_entropy(stage(hidden.requires_grad_()), y).backward()
            dist.send(hidden.grad, 0)
        optimizer.step()


class Experts(nn.Module):
    """One expert per rank; tokens travel to their expert and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.expert = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, *, skips: bool) -> Tensor:
        if skips and not len(tokens):  # a rank without tokens still has to receive those of the others
            return tokens
        counts = torch.tensor([len(tokens) // 2, len(tokens) - len(tokens) // 2])
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        own = torch.empty(int(arriving.sum()), 4)
        dist.all_to_all_single(own, tokens, arriving.tolist(), counts.tolist())
        back = torch.empty_like(tokens)
        dist.all_to_all_single(back, self.expert(own).detach(), counts.tolist(), arriving.tolist())
        return back + self.expert(tokens)


@port(case="deepspeed-5794", rule="stall", severity="error", names="rank 1 all_reduce", begins=3)
def rank_without_tokens_skips_all_to_all(injected: bool) -> None:
    """Tokens are spread unevenly; the run hangs until the process group gives up."""
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of_all = torch.zeros(1)
    for step in range(STEPS):
        is_empty = step == 3 and dist.get_rank() == 1
        optimizer.zero_grad()
        loss = model(torch.randn(0 if is_empty else 8, 4), skips=injected).square().sum()
        if loss.requires_grad:
            loss.backward()
        dist.all_reduce(loss_of_all.copy_(loss.detach()))
        optimizer.step()


HANGING = ("rank_without_tokens_skips_all_to_all",)
"""Cases that hang, each in a launch of its own."""

STALL_S, TIMEOUT_S = 2.0, 12.0
"""Seconds after which a hang is reported, and after which the process group gives up."""


def main() -> None:
    """Train the cases that the command line names, each without and with its error."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    hangs = set(names) <= set(HANGING)
    settings: dict[str, Any] = {"stalls": {"after": STALL_S}} if hangs else {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S if hangs else 60))
    LINK.install()
    for injected in (False, True):
        for name in names:
            run = folder / (name if injected else f"{name}-control")
            with (
                contextlib.suppress(RuntimeError) if hangs and injected else contextlib.nullcontext(),
                backlight.watch(run=run, every=1, quiet=True, **settings),
            ):
                CASES[name].train(injected)
    if not hangs:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
