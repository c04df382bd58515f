"""The whole parameters that FSDP2 puts in place of its shards while a module computes.

Backward differentiates by those, so a hook on one sees the gradient of this rank's microbatch before it is
reduced and scattered. torch keeps them under private names, which are read here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from backlight.capture.modules import walk


def unsharded(roots: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Return the whole parameter by the ``id`` of the sharded one, as far as they exist.

    Before the first forward of a module, and in a release that names them otherwise, there are none.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return {}
    found: dict[int, torch.Tensor] = {}
    for root in roots:
        for _, module in walk(root):
            if issubclass(type(module), kind):
                found.update(_of(module))
    return found


def _of(module: Any) -> dict[int, torch.Tensor]:
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = getattr(state, "_fsdp_param_group", None)
        groups = [] if one is None else [one]
    out = {}
    for group in groups:
        for held in getattr(group, "fsdp_params", ()):
            whole = getattr(held, "_unsharded_param", None)
            if isinstance(whole, torch.Tensor):
                out[id(held.sharded_param)] = whole
    return out
