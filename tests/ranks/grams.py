"""Grams and gathered replicates of wrapped and sharded models; started by torchrun on two ranks.

torchrun --nproc-per-node 2 grams.py FOLDER
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import backlight
from backlight.monitors.spectra.instrument.worker_thread import StepMeasurement
from ranks.network import Net, adam, batch, build, loss_of
from ranks.training_run import FOLDER, backlight_warnings, collectives, sharded, tensor_parallel

MICRO = 2
SEEN: dict[str, list[Tensor]] = {}


def loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
    output = model(samples[0])
    return nn.functional.cross_entropy(output.flatten(0, 1), samples[1].flatten(), reduction="sum")


def same(measured: Any, plain: Any) -> bool:
    names = plain.per_parameter
    return set(names) == set(measured.per_parameter) and all(
        torch.allclose(names[n], measured.per_parameter[n], rtol=1e-10, atol=1e-13) for n in names
    )


def grams() -> dict[str, Any]:
    """Measure the Gram of this rank's samples on wrapped and sharded models."""
    samples = tuple(t.chunk(2)[dist.get_rank()] for t in batch(0))
    out: dict[str, Any] = {}
    before = collectives()
    plain = backlight.gram(build(), loss, samples)
    ddp = DistributedDataParallel(build())
    wrapped = collectives()
    out["ddp"] = same(backlight.gram(ddp, loss, samples), plain)
    out["ddp_collectives"] = collectives() - wrapped
    mesh = init_device_mesh("cpu", (2,))
    for name, make in {"fsdp": sharded, "tensor": lambda: tensor_parallel(mesh)}.items():
        model, tied = make(), name == "fsdp"
        wanted = plain if tied else backlight.gram(build(tied=False), loss, samples)
        shards = [p.to_local().clone() for p in model.parameters() if hasattr(p, "to_local")]
        try:
            backlight.gram(model, loss, samples)
        except ValueError as error:
            out[f"{name}_refused"] = str(error)
        with backlight.gathered(model):
            out[name] = same(backlight.gram(model, loss, samples), wanted)
        now = [p.to_local() for p in model.parameters() if hasattr(p, "to_local")]
        out[f"{name}_unchanged"] = bool(now) and all(map(torch.equal, now, shards))
        out[f"{name}_without_gradients"] = all(p.grad is None for p in model.parameters())
    assert collectives() > before
    return out


def replicate(model: Net, rank: int, micro: int) -> dict[str, Tensor]:
    """Return the gradients of one microbatch of a rank."""
    x, y = (t.chunk(2)[rank].chunk(MICRO)[micro] for t in batch(0))
    model.zero_grad()
    (loss_of(model(x), y) / MICRO).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def exchange(make: Callable[[], Any]) -> dict[str, Any]:
    """Gather the microbatches of both ranks: four replicates of each matrix."""
    original = StepMeasurement._layer

    def layer(self: Any, caught: Any, name: str, G: list[Tensor], *rest: Any) -> None:
        SEEN.setdefault(name, [part.clone() for part in G])
        original(self, caught, name, G, *rest)

    StepMeasurement._layer = layer  # type: ignore[method-assign]
    SEEN.clear()
    model, rank = make(), dist.get_rank()
    optimizer = adam(model)
    with (
        backlight_warnings() as messages,
        backlight.watch(
            model,
            optimizer,
            run=FOLDER / make.__name__,
            monitors=("spectra",),
            every=2,
            spectra={"exchange": True, "timeout": 60.0, "exclude": ("unused",)},
        ),
    ):
        for step in range(3):
            optimizer.zero_grad()
            for m in range(MICRO):
                x, y = (t.chunk(2)[rank].chunk(MICRO)[m] for t in batch(step))
                (loss_of(model(x), y) / MICRO).backward()
            optimizer.step()
    StepMeasurement._layer = original  # type: ignore[method-assign]
    alone = [replicate(build(), r, m) for r in range(2) for m in range(MICRO)]
    right = {
        name: len(parts) == len(alone)
        and all(any(torch.allclose(part, one[name], 1e-12) for one in alone) for part in parts)
        and all(any(torch.allclose(part, one[name], 1e-12) for part in parts) for one in alone)
        for name, parts in SEEN.items()
    }
    return {"layers": right, "warnings": messages}


def wrapped() -> Any:
    return DistributedDataParallel(build(), find_unused_parameters=True)


def main() -> None:
    dist.init_process_group("gloo")
    result = {"grams": grams(), "sharded": exchange(sharded), "wrapped": exchange(wrapped)}
    (FOLDER / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
