"""Begin and end of a backward pass, by wrapping ``torch.autograd.backward`` and ``torch.autograd.grad``.

``Tensor.backward`` looks that name up at every call. What escapes: a script that imported a function by
name before watching began, and transforms of ``torch.func``, which have no backward that one could be in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from backlight.capture.hooks.patch import Patches
    from backlight.capture.hub import Hub

_transforms: Callable[[], Any] | None = getattr(torch._C._functorch, "peek_interpreter_stack", None)


def install(hub: Hub, patches: Patches) -> None:
    """Report every outermost backward, and every outermost computation of gradients, to the hub."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not hub.active or torch.compiler.is_compiling():
                original(tensors, *args, **kwargs)
                return
            tensors, roots = _kept(tensors)
            if hub.backward_depth or hub.grad_depth:
                # Re-entrant checkpointing calls this inside a backward: only the outermost counts.
                hub.emit("nested_begin")
                original(tensors, *args, **kwargs)
                return
            hub.emit("backward_begin", roots)
            hub.backward_depth += 1
            try:
                original(tensors, *args, **kwargs)
            except BaseException as error:
                hub.emit("backward_raised", error)
                raise
            finally:
                hub.backward_depth -= 1
                hub.emit("backward_end")

        return backward

    def wrap_grad(original: Any) -> Any:
        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or torch.compiler.is_compiling() or _transforms is None or _transforms():
                return original(outputs, inputs, *args, **kwargs)
            outputs, roots = _kept(outputs)
            if hub.backward_depth or hub.grad_depth:
                hub.emit("nested_begin")
                return original(outputs, inputs, *args, **kwargs)
            hub.emit("grad_begin", roots)
            hub.grad_depth += 1
            try:
                return original(outputs, inputs, *args, **kwargs)
            except BaseException as error:
                hub.emit("backward_raised", error)
                raise
            finally:
                hub.grad_depth -= 1
                hub.emit("grad_end")

        return grad

    patches.replace(torch.autograd, "backward", wrap)
    patches.replace(torch.autograd, "grad", wrap_grad)


def _kept(given: Any) -> tuple[Any, Sequence[torch.Tensor]]:
    """Return what was given, an iterator read into a tuple, and the tensors in it."""
    if isinstance(given, torch.Tensor):
        return given, (given,)
    if isinstance(given, Iterator):
        given = tuple(given)
    # type() first: an edge of a graph is a named tuple.
    listed = given if type(given) in {list, tuple} else ()
    return given, tuple(one for one in listed if isinstance(one, torch.Tensor))
