"""Operations of torch as a function mode sees them: name, tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch

WORDS = {
    "__get__": "get",
    "__set__": "set",
    "__delete__": "delete",
}

_ASKING = """
size dim numel nelement stride storage_offset is_contiguous element_size __len__ is_floating_point is_complex
data_ptr untyped_storage storage type backward register_hook __hash__ __repr__ __format__ retain_grad _is_view
register_post_accumulate_grad_hook is_same_size has_names get_device ndimension is_set_to __reduce_ex__
__deepcopy__ __setstate__ _set_grad_enabled is_grad_enabled set_grad_enabled _make_subclass equal allclose
is_shared is_pinned is_inference is_tensor __dir__
"""
QUIET = frozenset(_ASKING.split())
"""Functions that ask or arrange something and compute no values."""

_TAKING = "numpy __array__ item tolist __float__ __int__ __bool__ __index__ __complex__ __dlpack__ is_nonzero"
VALUES = frozenset(_TAKING.split())
"""Functions that take a value out of torch."""

NUMPY = frozenset({"numpy", "__array__", "__dlpack__", "tolist", "item", "__float__"})
"""Those of ``VALUES`` whose result is often computed with and put back; the others decide a branch."""

_PROPERTIES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag"})


def operation_name(function: Any) -> str:
    """Return the name of what was called; a property is ``data.get`` or ``requires_grad.set``.

    Empty for a property that only describes a tensor, such as its shape.
    """
    name: str = getattr(function, "__name__", "") or type(function).__name__
    word = WORDS.get(name)
    if word is None:
        return name
    owner = getattr(function, "__self__", None)
    field = getattr(owner, "__name__", "")
    return f"{field}.{word}" if field in _PROPERTIES or word == "set" else ""


def tensors_in(values: Any, found: list[torch.Tensor] | None = None, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    found = [] if found is None else found
    if isinstance(values, torch.Tensor):
        found.append(values)
    elif depth and isinstance(values, (tuple, list)):
        for value in values:
            tensors_in(value, found, depth - 1)
    elif depth and isinstance(values, dict):
        for value in values.values():
            tensors_in(value, found, depth - 1)
    return found


def written(name: str, inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return which of its ``inputs`` the operation changes in place."""
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
