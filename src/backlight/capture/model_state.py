"""A model in another state for a while: gathered from all ranks, or passed through and left as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.modules import table_of, walk
from backlight.capture.sharding import wholes
from backlight.devices import is_accelerator, random_states, set_random_states

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def spread(model: nn.Module) -> bool:
    """Return whether a parameter of ``model`` is a part of a whole on several processes."""
    return any(
        hasattr(p, "placements")
        for _, module in walk(model)
        for p in table_of(module, "_parameters").values()
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; a collective where it is spread over processes."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Put whole parameters in place of the parts of ``model``, and remove its communication.

    A collective: every process that holds a part has to come here. Each then holds all parameters in memory.
    Inside, on any rank, the model is that of one process: ``backlight.gram`` measures it as such.
    """
    wholes: dict[int, nn.Parameter] = {}
    places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in dict.fromkeys(module for _, module in walk(model)):
        parameters = table_of(module, "_parameters")
        for key, part in parameters.items():
            if hasattr(part, "placements"):
                if id(part) not in wholes:
                    wholes[id(part)] = nn.Parameter(full(part.detach()), requires_grad=part.requires_grad)
                places.append((parameters, key, part))
        for name in _HOOKS:
            table = vars(module).get(name) or {}
            if any(_communicates(hook) for hook in table.values()):
                hooks.append((table, dict(table)))
    try:
        for parameters, key, part in places:
            parameters[key] = wholes[id(part)]
        for table, kept in hooks:
            for number, hook in kept.items():
                if _communicates(hook):
                    del table[number]
        yield
    finally:
        for parameters, key, part in places:
            parameters[key] = part
        for table, kept in hooks:
            table.clear()
            table.update(kept)  # in their order


@contextlib.contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Put float64 copies in place of floating parameters and buffers; tied ones stay tied."""
    copies: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in dict.fromkeys(module for _, module in walk(model)):
        for table in (table_of(module, "_parameters"), table_of(module, "_buffers")):
            for key, tensor in table.items():
                if tensor is not None and tensor.is_floating_point():
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _double(tensor)
                    places.append((table, key, tensor))
    try:
        for table, key, tensor in places:
            table[key] = copies[id(tensor)]
        yield
    finally:
        for table, key, tensor in places:
            table[key] = tensor


def _double(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().to(torch.float64, copy=True)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_parameter else copy


def _communicates(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def unsharded(roots: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Return the whole parameter by the ``id`` of the sharded one, as far as they exist.

    Before the first forward of a module, and in a release that names them otherwise, there are none.
    """
    whole_of: dict[int, torch.Tensor] = {}
    for root in roots:
        for _, module in walk(root):
            whole_of.update(wholes(module))
    return whole_of


class PreservedState:
    """State of a model before a pass, and whether the pass drew random numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        devices = {parameter.device for parameter in model.parameters()}
        self.devices = [device for device in devices if is_accelerator(device)]
        self.states = random_states(self.devices)

    @property
    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        return not all(map(torch.equal, self.states, random_states(self.devices)))

    def restore_buffers(self) -> None:
        """Restore the buffers."""
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)

    def rewind(self, states: Sequence[torch.Tensor] | None = None) -> None:
        """Restore buffers, training modes and the random state, or an earlier random state."""
        self.restore_buffers()
        for module, training in self._modes:
            module.training = training
        set_random_states(self.devices, states or self.states)


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[PreservedState]:
    """Restore buffers, training modes and random state of ``model`` at the end; passes are not reported."""
    state = PreservedState(model)
    try:
        with HUB.aside():
            yield state
    finally:
        state.rewind()
