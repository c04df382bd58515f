"""Trainings on several ranks over gloo, watched and unwatched; run by test_training_ranks.py.

    python ranked.py FOLDER MODES    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Each mode writes what its rank saw as JSON into FOLDER.
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
from backlight.monitors.spectra.instrument.step_measurement import StepMeasurement
from spectra.watched import batch, build, loss_of

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
SEEN: dict[str, list[Tensor]] = {}


def keep() -> None:
    """Keep what is measured: the replicates of the first step by layer."""
    original = StepMeasurement._layer

    def layer(self: Any, caught: Any, name: str, G: list[Tensor], *rest: Any) -> None:
        SEEN.setdefault(name, [part.clone() for part in G])
        original(self, caught, name, G, *rest)

    StepMeasurement._layer = layer  # type: ignore[method-assign]


@contextlib.contextmanager
def watched(
    mode: str, model: nn.Module, optimizer: torch.optim.Optimizer, **spectra: Any
) -> Iterator[list[str]]:
    """Watch a training, and give the warnings."""
    SEEN.clear()
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
        "replicates": {name: len(parts) for name, parts in SEEN.items()},
        **more,
    }
    (FOLDER / f"{mode}-{dist.get_rank()}.json").write_text(json.dumps(result))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def parallel(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(build(), **options)


def unreduced(model: Any) -> Callable[[bool], Any]:
    return lambda last: contextlib.nullcontext() if last else model.no_sync()


def ddp() -> None:
    """Accumulation without reduction between: each layer on one rank, from its own microbatches."""
    plain = parallel()
    loop(plain, adam(plain), 4, sync=unreduced(plain))
    model = parallel()
    optimizer = adam(model)
    with watched("ddp", model, optimizer) as messages:
        loop(model, optimizer, 4, sync=unreduced(model))
    report("ddp", messages, plain, model, right=_right(4))


def ddp_static() -> None:
    """A static graph, reduced at every backward, into buckets that gradients are views of."""
    options = {"static_graph": True, "gradient_as_bucket_view": True}
    plain = parallel(**options)
    loop(plain, adam(plain), 3)
    model = parallel(**options)
    optimizer = adam(model)
    with watched("ddp_static", model, optimizer) as messages:
        loop(model, optimizer, 3)
    report("ddp_static", messages, plain, model)


def exchange() -> None:
    """Two microbatches on each of two ranks are four replicates."""
    plain = parallel()
    loop(plain, adam(plain), 2, sync=unreduced(plain))
    model = parallel()
    optimizer = adam(model)
    with watched("exchange", model, optimizer, exchange=True) as messages:
        loop(model, optimizer, 2, sync=unreduced(model))
    report("exchange", messages, plain, model)


def controls() -> None:
    """Both ranks read the same data."""
    model = build().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched("controls", model, optimizer, exchange=True) as messages:
        loop(model, optimizer, 2, steps=1, reader=0)
    report("controls", messages, model, model)


def missing() -> None:
    """One rank has no gradient of a layer in one microbatch: all drop that layer."""
    models = []
    for is_watched in (False, True):
        model = build()
        optimizer = adam(model)

        def before(micro: int, model: Any = model) -> None:
            model.block.up.weight.requires_grad_(not (dist.get_rank() == 1 and micro == 0))

        if is_watched:
            with watched("missing", model, optimizer, exchange=True) as messages:
                loop(model, optimizer, 2, before=before)
        else:
            loop(model, optimizer, 2, before=before)
        models.append(model)
    report("missing", messages, *models)


def fewer() -> None:
    """One rank ends early: the other gives up waiting for it, and trains on."""
    steps = 3 if dist.get_rank() == 1 else 7
    plain = build()
    loop(plain, adam(plain), 2, steps)
    model = build()
    optimizer = adam(model)
    with watched("fewer", model, optimizer, exchange=True, timeout=3.0) as messages:
        loop(model, optimizer, 2, steps)
    report("fewer", messages, plain, model)


def sharded() -> Any:
    model = build()
    fully_shard(model.block)
    return fully_shard(model)


def fsdp() -> None:
    """FSDP2: gradients before they are reduced and scattered."""
    plain = sharded()
    loop(plain, adam(plain), 3)
    model = sharded()
    optimizer = adam(model)
    with watched("fsdp", model, optimizer) as messages:
        loop(model, optimizer, 3)
    report("fsdp", messages, plain, model, right=_right(3))


def _right(micro: int) -> bool:
    """Return whether the replicates of the first step are the gradients of this rank's microbatches alone."""
    alone = build()
    torch.manual_seed(dist.get_rank())
    right = bool(SEEN)
    for m in range(micro):
        alone.zero_grad()
        (loss_of(alone, batch(10 * m + dist.get_rank())) / micro).backward()
        for name, parts in SEEN.items():
            right = right and torch.equal(parts[m], alone.get_parameter(name).grad)  # type: ignore[arg-type]
    return right


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
