"""What FSDP2 keeps of the parameters that it manages; torch has it under private names, read here alone.

A module holds the shards of its parameters, or the whole ones while it computes, and for longer where the
user says so. The optimizer holds the shards, always: they are the parameters. The whole ones are memory that
FSDP2 frees and fills again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def held(module: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 keeps for each parameter that ``module`` manages; nothing for any other module.

    In a release that names it otherwise there is nothing.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    # type() first: isinstance() on a stranger may run its __class__ property.
    if kind is None or not issubclass(type(module), kind):
        return
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = getattr(state, "_fsdp_param_group", None)
        groups = [] if one is None else [one]
    for group in groups:
        yield from getattr(group, "fsdp_params", ())


def shards(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """Return the shard of each parameter that ``module`` manages, by ``id`` and name of who owns it."""
    out: dict[tuple[int, str], nn.Parameter] = {}
    for one in held(module):
        place, shard = getattr(one, "_module_info", None), getattr(one, "sharded_param", None)
        if place is None or not isinstance(shard, nn.Parameter):
            continue
        out[id(place.module), place.param_name] = shard
        shared = zip(place.shared_modules, place.shared_param_names, strict=True)
        out.update({(id(owner), name): shard for owner, name in shared})
    return out


def wholes(module: nn.Module) -> dict[int, torch.Tensor]:
    """Return the whole parameter by the ``id`` of its shard, as far as there are any."""
    out = {}
    for one in held(module):
        whole = getattr(one, "_unsharded_param", None)
        if isinstance(whole, torch.Tensor):
            out[id(one.sharded_param)] = whole
    return out
