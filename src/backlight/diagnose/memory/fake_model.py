"""Models, batches and optimizers of fake tensors, and models whose blocks are checkpointed.

A model is built on the device ``meta`` where that works. Where its constructor reads values or files, it is
built real and each parameter is replaced by a fake one as soon as it is registered; where that fails too, it
is built whole and copied. Everything fake is on the CPU: on ``cuda`` it would abort a process without CUDA.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from backlight.capture.modules import walk
from backlight.diagnose.memory.result import Blocks

Object = TypeVar("Object")

META, PIECEWISE, REAL = "meta", "piecewise", "real"


def fake_mode() -> FakeTensorMode:
    """Return the mode that every fake tensor of a prediction belongs to."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(value: Object, mode: FakeTensorMode) -> Object:
    """Return a deep copy of any object with fake tensors in place of its tensors, ties and views kept."""
    with _FakeCopies(mode):
        return copy.deepcopy(value)


def build_fake(build: Callable[[], nn.Module], mode: FakeTensorMode) -> tuple[nn.Module, str]:
    """Return a fake model and how it was built; where ``build`` fails, it is retried with more memory."""
    try:
        with torch.device("meta"):
            model = build()
        return as_fake(model, mode), META
    except Exception:  # noqa: BLE001 - a constructor may fail on meta and work on real tensors
        pass
    try:
        return as_fake(_piecewise(build, mode), mode), PIECEWISE
    except Exception:  # noqa: BLE001 - the last build shows what is wrong with the recipe itself
        pass
    return as_fake(build(), mode), REAL


def _piecewise(build: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    def replace(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or isinstance(parameter, FakeTensor):
            return None
        known = made.get(id(parameter))
        if known is None:
            # The original is kept so that its id stays taken; its values are not.
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


class _FakeCopies(TorchFunctionMode):
    """Makes a fake tensor of every tensor that is deep-copied."""

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


def repeated_blocks(model: nn.Module) -> tuple[Blocks, ...]:
    """Return groups of at least two siblings of one structure, the outermost only.

    A block has child modules and parameters; two have one structure if their modules have the same names
    and types, and their parameters the same shapes and types.
    """
    found: list[Blocks] = []
    inside: list[str] = []
    for name, module in walk(model):
        if any(name == block or name.startswith(f"{block}.") for block in inside):
            continue
        groups: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for key, child in module.named_children():
            if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                full = f"{name}.{key}" if name else key
                groups.setdefault(_structure(child), []).append((full, child))
        for members in groups.values():
            if len(members) > 1:
                names = tuple(full for full, _ in members)
                found.append(Blocks(parent=name, type=type(members[0][1]).__name__, names=names))
                inside += names
    return tuple(found)


def checkpoint_modules(
    model: nn.Module,
    names: Collection[str],
    entered: Callable[[str], AbstractContextManager[None]],
    *,
    reentrant: bool = False,
) -> None:
    """Make the modules of these names recompute their forward in backward, in place.

    ``entered`` is called around each forward, also around a recomputed one, for which hooks do not run.
    """
    for name, module in walk(model):
        if name in names:
            module.forward = _checkpointed(name, module.forward, entered, reentrant=reentrant)


def _checkpointed(
    name: str,
    forward: Callable[..., Any],
    entered: Callable[[str], AbstractContextManager[None]],
    *,
    reentrant: bool,
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(name):
            return forward(*args, **kwargs)

    return functools.partial(checkpoint, run, use_reentrant=reentrant)


def _structure(block: nn.Module) -> Hashable:
    return (
        tuple((name, type(module)) for name, module in block.named_modules()),
        tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()),
    )
