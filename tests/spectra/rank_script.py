"""Training runs on several ranks over gloo, watched and unwatched; run by test_training_ranks.py.

    python rank_script.py FOLDER MODES    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Each mode writes the result of its rank as JSON into FOLDER.
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import backlight
from backlight.monitors.spectra.instrument.worker_thread import StepMeasurement
from spectra.training import batch, build, loss_of

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
MEASURED: dict[str, list[Tensor]] = {}


def keep() -> None:
    """Record the measured replicates of the first step by layer."""
    original = StepMeasurement._layer

    def layer(self: Any, caught: Any, name: str, G: list[Tensor], *rest: Any) -> None:
        MEASURED.setdefault(name, [part.clone() for part in G])
        original(self, caught, name, G, *rest)

    StepMeasurement._layer = layer  # type: ignore[method-assign]


@contextlib.contextmanager
def watched(
    mode: str, model: nn.Module, optimizer: torch.optim.Optimizer, **spectra: Any
) -> Iterator[list[str]]:
    """Watch a run and yield its warnings."""
    MEASURED.clear()
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = FOLDER / mode / "run"
        settings: dict[str, Any] = {"spectra": {"timeout": 60.0, **spectra}}
        with backlight.watch(model, optimizer, run=run, monitors=("spectra",), every=2, **settings):
            yield messages
    messages.extend(str(w.message) for w in caught if "backlight" in str(w.message))


def loop(
    model: Any,
    optimizer: torch.optim.Optimizer,
    micro: int,
    steps: int = 3,
    sync: Callable[[bool], Any] = lambda _last: contextlib.nullcontext(),
    before: Callable[[int], None] = lambda _micro: None,
    reader: int | None = None,
) -> None:
    rank = dist.get_rank() if reader is None else reader
    torch.manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        for m in range(micro):
            before(m)
            with sync(m == micro - 1):
                (loss_of(model, batch(1000 * step + 10 * m + rank)) / micro).backward()
        optimizer.step()


def report(mode: str, messages: list[str], plain: nn.Module, model: nn.Module, **more: Any) -> None:
    one, other = (
        [p.to_local() if hasattr(p, "to_local") else p for p in m.parameters()] for m in (plain, model)
    )
    result = {
        "same": all(torch.equal(a, b) for a, b in zip(one, other, strict=True)),
        "warnings": messages,
        "replicates": {name: len(parts) for name, parts in MEASURED.items()},
        **more,
    }
    (FOLDER / f"{mode}-{dist.get_rank()}.json").write_text(json.dumps(result))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def parallel(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(build(), **options)


def sharded() -> Any:
    model = build()
    fully_shard(model.block)
    return fully_shard(model)


def compare(
    mode: str,
    micro: int,
    make: Callable[[], Any] = parallel,
    *,
    steps: int = 3,
    accumulate: bool = False,
    before: Callable[[Any, int], None] = lambda _model, _micro: None,
    exact: bool = False,
    **spectra: Any,
) -> None:
    """Train unwatched and watched, and report; ``accumulate`` reduces at the last microbatch only."""

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        def sync(last: bool) -> Any:
            return model.no_sync() if accumulate and not last else contextlib.nullcontext()

        loop(model, optimizer, micro, steps, sync=sync, before=lambda m: before(model, m))

    plain, model = make(), make()
    train(plain, adam(plain))
    optimizer = adam(model)
    with watched(mode, model, optimizer, **spectra) as messages:
        train(model, optimizer)
    more = {"exact": replicates_are_exact(micro)} if exact else {}
    report(mode, messages, plain, model, **more)


def ddp() -> None:
    """Gradient accumulation: each layer is measured on one rank, from its own microbatches."""
    compare("ddp", 4, accumulate=True, exact=True)


def ddp_static() -> None:
    """A static graph, reduced in every backward, with gradients as views of buckets."""
    compare("ddp_static", 3, lambda: parallel(static_graph=True, gradient_as_bucket_view=True))


def exchange() -> None:
    """Two microbatches on each of two ranks are four replicates."""
    compare("exchange", 2, accumulate=True, exchange=True)


def controls() -> None:
    """Both ranks read the same data."""
    model = build().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched("controls", model, optimizer, exchange=True) as messages:
        loop(model, optimizer, 2, steps=1, reader=0)
    report("controls", messages, model, model)


def missing() -> None:
    """One rank has no gradient of a layer in one microbatch: all ranks drop that layer."""

    def before(model: Any, micro: int) -> None:
        model.block.up.weight.requires_grad_(not (dist.get_rank() == 1 and micro == 0))

    compare("missing", 2, build, before=before, exchange=True)


def fewer() -> None:
    """One rank ends early: the other stops waiting for it and continues."""
    compare("fewer", 2, build, steps=3 if dist.get_rank() == 1 else 7, exchange=True, timeout=3.0)


def fsdp() -> None:
    """FSDP2: gradients before they are reduced and scattered."""
    compare("fsdp", 3, sharded, exact=True)


def replicates_are_exact(micro: int) -> bool:
    """Return whether the replicates of the first step are the gradients of this rank's microbatches alone."""
    alone = build()
    torch.manual_seed(dist.get_rank())
    exact = bool(MEASURED)
    for m in range(micro):
        alone.zero_grad()
        (loss_of(alone, batch(10 * m + dist.get_rank())) / micro).backward()
        for name, parts in MEASURED.items():
            exact = exact and torch.equal(parts[m], alone.get_parameter(name).grad)  # type: ignore[arg-type]
    return exact


def main() -> None:
    dist.init_process_group("gloo")
    keep()
    for mode in (globals()[name] for name in sys.argv[2].split(",")):
        mode()
        if mode is not fewer:
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


main()
