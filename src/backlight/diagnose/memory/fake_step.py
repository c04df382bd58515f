"""A model, a batch and an optimizer without memory: fake tensors of the shapes that they would have.

The model is built on the device ``meta`` where that works. Where its constructor reads values or files,
it is built real, each parameter replaced by a fake one as soon as it is registered; where that fails too
it is built whole and copied. Everything fake is on the CPU: on ``cuda`` it would abort a process
that has none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

Object = TypeVar("Object")

META, PIECEWISE, REAL = "meta", "piecewise", "real"


def fake_mode() -> FakeTensorMode:
    """Return the mode that every fake tensor of a prediction belongs to."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(value: Object, mode: FakeTensorMode) -> Object:
    """Return a deep copy of any object with fake tensors in place of its tensors, ties and views kept."""
    with _Copies(mode):
        return copy.deepcopy(value)


def build_fake(build: Callable[[], nn.Module], mode: FakeTensorMode) -> tuple[nn.Module, str]:
    """Return a fake model and how it was built.

    Parameters
    ----------
    build:
        Makes the model; called again with more memory at its disposal where the first way fails.

    Raises
    ------
    Exception
        What ``build`` raises when it is let do as it likes.
    """
    try:
        with torch.device("meta"):
            model = build()
        return as_fake(model, mode), META
    except Exception:  # noqa: BLE001 - whatever a constructor cannot do on meta, it may do for real
        pass
    try:
        return as_fake(_piecewise(build, mode), mode), PIECEWISE
    except Exception:  # noqa: BLE001 - the last way shows what is wrong with the recipe itself
        pass
    return as_fake(build(), mode), REAL


def _piecewise(build: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    def replace(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or isinstance(parameter, FakeTensor):
            return None
        known = made.get(id(parameter))
        if known is None:
            # The original is kept as long as its id stands for it, but not its values.
            known = (as_fake(parameter, mode), parameter)
            made[id(parameter)] = known
            parameter.data = parameter.data.new_empty(0)
        return known[0]

    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]  # may replace it, as torch documents
    try:
        return build()
    finally:
        handle.remove()


class _Copies(TorchFunctionMode):
    """Makes every tensor that is copied deeply a fake one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._storages: dict[int, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.clone:  # how a parameter copies its data
            return self._fake(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(tensor, FakeTensor):
                return tensor
            if tensor.layout is not torch.strided:
                return self._mode.from_tensor(tensor, static_shapes=True)
            storage = tensor.untyped_storage()
            with self._mode:
                known = self._storages.get(storage._cdata)
                if known is None:
                    whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                    known = self._storages[storage._cdata] = (whole, storage)
                base = known[0].view(tensor.dtype) if known[0].numel() else known[0].to(tensor.dtype)
                made = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
                # A view in autograd's eyes would not be a leaf.
                return made.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)
