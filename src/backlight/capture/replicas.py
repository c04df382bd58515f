"""Which parameters a wrapper promises to keep equal on several ranks.

DistributedDataParallel promises it for all parameters that it does not ignore, a DTensor for the ranks over
which it is replicated. Plain tensors promise nothing: those of tensor and expert parallelism have one name
and other values on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backlight.capture.engines import engines
from backlight.capture.sharding import fsdp_params

_APART = "post_localSGD_hook"
"""Communication hook of DDP under which ranks train apart between averages."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold equal values, this one included, and whether these are equal to the last bit.

    DDP gives all ranks the same gradient. A replicated DTensor may be updated by what each rank computes on
    its own, which differs by rounding errors where a kernel is not deterministic.
    """

    ranks: tuple[int, ...]
    is_exact: bool
    by: str


def replicas(roots: Iterable[nn.Module], tensors: Iterable[torch.Tensor]) -> dict[int, Replicas]:
    """Return the replicas of parameters below ``roots`` and among ``tensors``, by ``id`` of the parameter."""
    replicas_of: dict[int, Replicas] = {}
    for tensor in tensors:
        if (ranks := _ranks_of(tensor)) is not None:
            replicas_of[id(tensor)] = Replicas(ranks, is_exact=False, by="DTensor")
    for wrapper in wrappers(roots):
        if any(hook.__name__ == _APART for hook, _ in getattr(wrapper, "_comm_hooks", ())):
            continue
        # Of distributed, there is what DDP needs.
        ranks = tuple(torch.distributed.get_process_group_ranks(wrapper.process_group))
        for name, parameter in wrapper.module.named_parameters():
            if name not in wrapper.parameters_to_ignore and len(ranks) > 1:
                replicas_of.setdefault(id(parameter), Replicas(ranks, is_exact=True, by="DDP"))
    for engine, members in engines(roots):
        for parameter in engine.module.parameters():
            # ZeRO writes over the parts of other ranks at each step; experts are on some ranks.
            if (
                len(members) > 1
                and not engine.zero_optimization_stage()
                and getattr(parameter, "allreduce", True)
            ):
                replica = Replicas(tuple(members), is_exact=True, by="DeepSpeed")
                replicas_of.setdefault(id(parameter), replica)
    return replicas_of


def wrappers(roots: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield every DistributedDataParallel among ``roots`` and the modules below them."""
    parallel = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    if parallel is not None:
        for root in roots:
            # type() first: isinstance() on a third-party object may run its __class__ property.
            yield from (module for module in root.modules() if issubclass(type(module), parallel))


def averaged_over(roots: Sequence[nn.Module]) -> list[int]:
    """Return the ranks over which DDP, FSDP or DeepSpeed averages gradients below ``roots``, with this one.

    Each of them is to train on other data. Empty where none of them is used, or a release names it otherwise.
    """
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    flat = [
        m for root in roots for m in root.modules() if sharded is not None and issubclass(type(m), sharded)
    ]
    for _, members in engines(roots):
        return members
    for wrapper in (*wrappers(roots), *flat):
        return list(torch.distributed.get_process_group_ranks(wrapper.process_group))
    for entry in (part for root in roots for module in root.modules() for part in fsdp_params(module)):
        mesh = getattr(getattr(entry, "mesh_info", None), "mesh", None)
        return [] if mesh is None else sorted(mesh.mesh.flatten().tolist())
    return []


def _ranks_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the ranks with the part of a DTensor that this rank holds, None where it is the only one."""
    placements: Sequence[Any] = getattr(tensor, "placements", None) or ()
    if not any(placement.is_replicate() for placement in placements):
        return None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    here = mesh.get_coordinate()
    if here is None:
        return None
    place = tuple(slice(None) if p.is_replicate() else at for p, at in zip(placements, here, strict=True))
    ranks = tuple(sorted(mesh.mesh[place].flatten().tolist()))
    return ranks if len(ranks) > 1 else None
