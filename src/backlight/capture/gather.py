"""A model that is spread over processes, for a while as one process would hold it.

Its parameters are gathered, and the hooks by which torch.distributed shards and communicates are off: a
forward is then that of the plain modules, and a backward reduces nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from backlight.capture.modules import walk

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def spread(model: nn.Module) -> bool:
    """Tell whether a parameter of ``model`` is a part of a whole on several processes."""
    return any(hasattr(p, "placements") for _, module in walk(model) for p in _own(module).values())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; a collective where it is spread over processes."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Put whole parameters in place of the parts of ``model``, and take its communication off.

    A collective: every process that holds a part has to come here. Each then holds all parameters in memory.
    Inside, on any rank, the model is that of one process: ``backlight.gram`` measures it as such.
    """
    wholes: dict[int, nn.Parameter] = {}
    places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in dict.fromkeys(module for _, module in walk(model)):
        own = _own(module)
        for key, part in own.items():
            if hasattr(part, "placements"):
                if id(part) not in wholes:
                    wholes[id(part)] = nn.Parameter(full(part.detach()), requires_grad=part.requires_grad)
                places.append((own, key, part))
        for name in _HOOKS:
            table = vars(module).get(name) or {}
            if any(_communicates(hook) for hook in table.values()):
                hooks.append((table, dict(table)))
    try:
        for own, key, part in places:
            own[key] = wholes[id(part)]
        for table, kept in hooks:
            for number, hook in kept.items():
                if _communicates(hook):
                    del table[number]
        yield
    finally:
        for own, key, part in places:
            own[key] = part
        for table, kept in hooks:
            table.clear()
            table.update(kept)  # in their order


def _own(module: nn.Module) -> dict[str, Any]:
    return vars(module).get("_parameters") or {}


def _communicates(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
