"""Where FSDP1 and FSDP2 keep the parameters that they manage: private names of torch, read here alone.

FSDP1 lays the parameters of a module one behind the other and cuts the line into equal pieces, so that a rank
holds a run of elements of some parameters and nothing of the others. With ``use_orig_params=True`` the names
and the parameters stay, each as a view of its run; else there is one parameter, the line itself.

A module of FSDP2 holds the shards of its parameters, or the whole ones while it computes, and for longer
where the user asks for it. The optimizer always holds the shards: they are the parameters. The whole ones are
memory that FSDP2 frees and fills again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backlight.records import Layout, Placement


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """The shape of a parameter before it was cut, and which run of its elements this process holds."""

    shape: tuple[int, ...]
    placement: Placement


def flat_places(roots: Sequence[nn.Module]) -> dict[int, FlatPlace]:
    """Return the positions of the parameters that FSDP1 manages below ``roots``, by ``id``.

    In a release that names it otherwise there is nothing.
    """
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is None:
        return {}
    places: dict[int, FlatPlace] = {}
    for root in roots:
        for module in root.modules():
            # type() first: isinstance() on a third-party object may run its __class__ property.
            if issubclass(type(module), fsdp) and (handle := getattr(module, "_handle", None)) is not None:
                places.update(_places(handle))
    return places


def _places(handle: Any) -> Iterator[tuple[int, FlatPlace]]:
    line: Any = getattr(handle, "flat_param", None)
    parameters, infos = getattr(line, "_params", None), getattr(line, "_shard_param_infos", None)
    world, rank = int(getattr(handle, "world_size", 1)), int(getattr(handle, "rank", 0))
    if parameters is None or infos is None:
        if line is not None and getattr(handle, "uses_sharded_strategy", False):
            size = int(line._sharded_size.numel())  # the last pieces are filled up with zeros
            yield id(line), FlatPlace((world * size,), _run(world * size, rank * size, size))
        return
    for parameter, info, shape in zip(parameters, infos, line._shapes, strict=True):
        size = int(info.numel_in_shard or 0) if info.in_shard else 0
        place = _run(math.prod(shape), int(info.intra_param_start_idx or 0), size)
        yield id(parameter), FlatPlace(tuple(shape), place)


def _run(whole: int, start: int, size: int) -> Placement:
    return Placement(Layout.SHARD, (whole,), (size,), (start if size else 0,))


def groups(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield what FSDP2 keeps for the parameters that ``module`` manages, by the group of one collective.

    Nothing for any other module, and in a release that names it otherwise.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    # type() first: isinstance() on a third-party object may run its __class__ property.
    if kind is None or not issubclass(type(module), kind):
        return
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    param_groups = getattr(state, "_fsdp_param_groups", None)
    if param_groups is None:
        single = getattr(state, "_fsdp_param_group", None)
        param_groups = [] if single is None else [single]
    for group in param_groups:
        yield tuple(getattr(group, "fsdp_params", ()))


def fsdp_params(module: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 keeps for each parameter that ``module`` manages; nothing for any other module."""
    for group in groups(module):
        yield from group


def shards(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """Return the shard of each parameter that ``module`` manages, by ``id`` and name of who owns it."""
    out: dict[tuple[int, str], nn.Parameter] = {}
    for part in fsdp_params(module):
        place, shard = getattr(part, "_module_info", None), getattr(part, "sharded_param", None)
        if place is None or not isinstance(shard, nn.Parameter):
            continue
        out[id(place.module), place.param_name] = shard
        shared = zip(place.shared_modules, place.shared_param_names, strict=True)
        out.update({(id(owner), name): shard for owner, name in shared})
    return out


def wholes(module: nn.Module) -> dict[int, torch.Tensor]:
    """Return the whole parameter by the ``id`` of its shard, as far as there are any."""
    out = {}
    for managed_param in fsdp_params(module):
        whole = getattr(managed_param, "_unsharded_param", None)
        if isinstance(whole, torch.Tensor):
            out[id(managed_param.sharded_param)] = whole
    return out
