"""Calls during a forward pass: running modules, and operations of torch in a function mode.

For the commands that explain a script; ``backlight run`` installs no hook on every call of every module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from backlight.capture.batches import tensors_in
from backlight.capture.modules import walk


class ModuleCalls:
    """Stack of the modules whose ``forward`` runs in the thread that entered it, innermost last.

    ``in_other_threads`` holds the ``id`` of modules that ran in another thread.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._handles: list[Any] = []
        self.stack: list[nn.Module] = []
        self.called: dict[int, weakref.ref[nn.Module]] = {}
        self.in_other_threads: set[int] = set()

    def __enter__(self) -> ModuleCalls:
        """Install the hooks."""
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            self.in_other_threads.add(id(module))
            return
        self.stack.append(module)
        if id(module) not in self.called:
            self.called[id(module)] = weakref.ref(module)

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # After an exception calls have no end: everything above this one has ended too.
        if threading.get_ident() == self._thread and any(m is module for m in self.stack):
            while self.stack.pop() is not module:
                pass

    def current(self) -> nn.Module | None:
        """Return the innermost running module."""
        return self.stack[-1] if self.stack else None

    def was_called(self, module: nn.Module) -> bool:
        """Return whether ``module`` has run in the observed thread."""
        reference = self.called.get(id(module))
        return reference is not None and reference() is module


def module_names(roots: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """Return the name of every module by its ``id``; a root without a prefix has the name of its class."""
    names: dict[int, str] = {}
    for prefix, root in roots:
        for name, module in walk(root, prefix):
            names.setdefault(id(module), name or type(module).__name__)
    return names


_ACCESS = {
    "__get__": "get",
    "__set__": "set",
    "__delete__": "delete",
}

_QUERIES = """
size dim numel nelement stride storage_offset is_contiguous element_size __len__ is_floating_point is_complex
data_ptr untyped_storage storage type backward register_hook __hash__ __repr__ __format__ retain_grad _is_view
register_post_accumulate_grad_hook is_same_size has_names get_device ndimension is_set_to __reduce_ex__
__deepcopy__ __setstate__ _set_grad_enabled is_grad_enabled set_grad_enabled _make_subclass equal allclose
is_shared is_pinned is_inference is_tensor __dir__
"""
NO_COMPUTATION = frozenset(_QUERIES.split())
"""Functions that query or arrange something and compute no values."""

_CONVERSIONS = (
    "numpy __array__ item tolist __float__ __int__ __bool__ __index__ __complex__ __dlpack__ is_nonzero"
)
LEAVES_TORCH = frozenset(_CONVERSIONS.split())
"""Functions that convert a value out of torch."""

RETURNS_TO_TORCH = frozenset({"numpy", "__array__", "__dlpack__", "tolist", "item", "__float__"})
"""Those of ``LEAVES_TORCH`` whose result is often used in further computation; the others decide a branch."""

_PROPERTIES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag"})


def operation_name(function: Any) -> str:
    """Return the name of an operation; a property is ``data.get`` or ``requires_grad.set``.

    Empty for a property that only describes a tensor, such as its shape.
    """
    name: str = getattr(function, "__name__", "") or type(function).__name__
    word = _ACCESS.get(name)
    if word is None:
        return name
    owner = getattr(function, "__self__", None)
    field = getattr(owner, "__name__", "")
    return f"{field}.{word}" if field in _PROPERTIES or word == "set" else ""


def written_in_place(name: str, inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the ``inputs`` that the operation changes in place."""
    if (
        (name.endswith("_") and not name.startswith("__"))
        or name in {"__setitem__", "data.set"}
        or (
            name.startswith("__i")
            and name.endswith("__")
            and name not in {"__invert__", "__int__", "__index__"}
        )
    ):
        return inputs[:1]
    if kwargs.get("inplace") is True:
        return inputs[:1]
    return tensors_in(kwargs["out"]) if kwargs.get("out") is not None else []
