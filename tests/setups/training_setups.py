"""One small model and the setups in which it is trained: the columns of the matrix.

A setup defines how the model is built and how its gradients are computed; what is trained on, and for how
long, is the same in all. A training knows nothing of backlight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

ROWS = 32
STEPS = 4
SCALE = 1024.0
FEATURES, CLASSES, WIDTH = 6, 3, 8

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A residual block between two layers, with a gate of which only one of two ranks holds a part."""

    def __init__(self, reentrant: bool | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.drop = nn.Dropout(drop)
        self.gate = nn.Linear(WIDTH, 1)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if self.reentrant is None or not torch.is_grad_enabled():
            h = self._block(h)
        else:
            h = checkpoint(self._block, h, use_reentrant=self.reentrant)
        return self.last(h)

    def _block(self, h: Tensor) -> Tensor:
        return h + torch.sigmoid(self.gate(h)) * self.drop(self.down(torch.relu(self.up(h))))


NAMES = tuple(name for name, _ in Net().named_parameters())
MATRICES = tuple(name for name, p in Net().named_parameters() if p.dim() == 2)


@dataclass(frozen=True)
class Setup:
    """A training setup.

    ``wrap`` makes of a fresh net what is trained; ``micro`` backwards per step; ``layout`` is the number of
    ranks that share the data and the number that share a layer.
    """

    name: str
    wrap: Callable[[Net], nn.Module] = lambda net: net
    micro: int = 1
    autocast: torch.dtype | None = None
    scaled: bool = False
    clip: bool = True
    reentrant: bool | None = None
    layout: tuple[int, int] = (1, 1)
    waiting: Callable[[nn.Module], Any] = field(default=lambda _model: contextlib.nullcontext())

    @property
    def whole_only(self) -> bool:
        """Whether parameters are sharded on every rank."""
        return self.wrap in {sharded, split, sharded_and_split, offloaded, mixed}

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.layout[0] * self.layout[1]


def compiled(net: Net) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(net, backend="aot_eager")  # type: ignore[return-value]


def without_sync(model: Any) -> Any:
    return model.no_sync()


def replicated(net: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(net)


def sharded(net: Net, mesh: Any = None, **policies: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh, **policies)
    return fully_shard(net, mesh=mesh, **policies)


def offloaded(net: Net) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=False))


def mixed(net: Net) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(
        net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )


def split(net: Net, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded_and_split(net: Net) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layer"))
    return sharded(split(net, mesh["layer"]), mesh["data"])  # type: ignore[arg-type]


SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("plain"),
        Setup("accumulation", micro=2),
        Setup("AMP fp16", autocast=torch.float16, scaled=True),
        Setup("bf16 autocast", autocast=torch.bfloat16),
        Setup("compile", wrap=compiled),
        Setup("checkpointing", reentrant=False),
        Setup("checkpointing, re-entrant", reentrant=True),
        Setup("DDP", wrap=replicated, layout=(2, 1), waiting=without_sync),
        Setup("FSDP2", wrap=sharded, layout=(2, 1)),
        # torch refuses to clip plain and distributed gradients together.
        Setup("TP", wrap=split, layout=(1, 2), clip=False),
        Setup("FSDP2 x TP", wrap=sharded_and_split, layout=(2, 2), clip=False),
    )
}

OTHERS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("FSDP2, offloaded", wrap=offloaded, layout=(2, 1)),
        Setup("FSDP2, bf16", wrap=mixed, layout=(2, 1)),
        Setup("FSDP2, accumulation", wrap=sharded, layout=(2, 1), micro=2),
        Setup("FSDP2, checkpointing", wrap=sharded, layout=(2, 1), reentrant=False),
        Setup(
            "DDP, compiled", wrap=lambda net: replicated(compiled(net)), layout=(2, 1), waiting=without_sync
        ),
        Setup("DDP, re-entrant", wrap=replicated, layout=(2, 1), reentrant=True, waiting=without_sync),
        Setup("DDP, accumulation", wrap=replicated, layout=(2, 1), micro=2, waiting=without_sync),
    )
}
"""Combinations of setups that have no column in the matrix."""


def net(setup: Setup | None = None, drop: float = 0.0) -> Net:
    """Return the same net each time."""
    torch.manual_seed(0)
    return Net(setup.reentrant if setup is not None else None, drop)


def build(setup: Setup, drop: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the wrapped model and its optimizer."""
    model = setup.wrap(net(setup, drop))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole_batch(step: int) -> Batch:
    """Return the batch of a step over all ranks and microbatches."""
    draw = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, FEATURES, generator=draw)
    return x, torch.randint(CLASSES, (ROWS,), generator=draw)


def share(setup: Setup) -> int:
    """Return the data shard of this rank; ranks that share a layer read the same shard."""
    return dist.get_rank() // setup.layout[1] if setup.ranks > 1 else 0


def microbatches(setup: Setup, step: int, part: int | None = None) -> list[Batch]:
    """Return the microbatches of one data shard in a step."""
    x, y = whole_batch(step)
    each = ROWS // setup.layout[0] // setup.micro
    begin = (share(setup) if part is None else part) * setup.micro
    return [
        (x[at : at + each], y[at : at + each])
        for at in range(begin * each, (begin + setup.micro) * each, each)
    ]


class Data(Dataset[Batch]):
    """Iterate over the microbatches of a run with ``pause`` seconds before each."""

    def __init__(self, setup: Setup, steps: int, pause: float = 0.0) -> None:
        self._all = [batch for step in range(steps) for batch in microbatches(setup, step)]
        self._pause = pause

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self._pause)
        return self._all[index]


class Sleepy(torch.autograd.Function):
    """Identity whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)  # at: backward
        return grad, None


@dataclass(frozen=True)
class Pauses:
    """Seconds of sleep in data loading, loss and backward.

    With a step, only its first microbatch sleeps in loss and backward.
    """

    data: float = 0.0
    loss: float = 0.0
    backward: float = 0.0
    step: int | None = None

    def at(self, step: int, microbatch: int) -> Pauses:
        """Return the pauses of one microbatch."""
        chosen = self.step is None or (step, microbatch) == (self.step, 0)
        return self if chosen else replace(self, loss=0.0, backward=0.0)


def train(
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    pauses: Pauses | None = None,
    overflow_at: int = -1,
    observe: Callable[[str, int, Tensor | None], None] = lambda _moment, _step, _loss: None,
) -> None:
    """Train; call ``observe`` with ``gradients`` and the mean loss after backward, and with each ``update``.

    ``overflow_at`` is the step whose loss is infinite, which a gradient scaler skips.
    """
    pauses = pauses or Pauses()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=setup.scaled)
    batches = iter(DataLoader(Data(setup, steps, pauses.data), batch_size=None))
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        mean = torch.zeros(())
        for number in range(setup.micro):
            x, y = next(batches)
            now = pauses.at(step, number)
            last = number == setup.micro - 1
            with contextlib.nullcontext() if last else setup.waiting(model):
                with torch.autocast("cpu", setup.autocast, enabled=setup.autocast is not None):
                    logits = model(x)
                if now.backward:
                    logits = Sleepy.apply(logits, now.backward)
                time.sleep(now.loss)
                loss = F.cross_entropy(logits.float(), y) / setup.micro
                if step == overflow_at:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                mean = mean + loss.detach()
        scaler.unscale_(optimizer)
        observe("gradients", step, mean)
        if setup.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        observe("update", step, None)


def replicates(setup: Setup, model: nn.Module, step: int) -> list[dict[str, Tensor]]:
    """Return the unreduced gradients of each microbatch of this rank."""
    out = []
    for x, y in microbatches(setup, step):
        model.zero_grad()
        with torch.autocast("cpu", setup.autocast, enabled=setup.autocast is not None):
            logits = model(x)
        scale = SCALE if setup.scaled else 1.0
        (scale * F.cross_entropy(logits.float(), y) / setup.micro).backward()
        out.append({n: p.grad / scale for n, p in named(model) if p.grad is not None})
    model.zero_grad()
    return out


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by their names without those of wrappers."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module.").removeprefix("_orig_mod."), parameter


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the local parts of ``tensors``."""
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of the local parts of a model's state."""
    return local([*model.parameters(), *model.buffers()])
