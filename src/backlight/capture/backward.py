"""Begin and end of a backward pass, by wrapping ``torch.autograd.backward``.

``Tensor.backward`` looks that name up at every call. What escapes: a script that imported the
function by name before watching began, and gradients taken by ``torch.autograd.grad``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from backlight.capture.hub import Hub
    from backlight.capture.patching import Patches


def install(hub: Hub, patches: Patches) -> None:
    """Report every outermost backward to the hub."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # Re-entrant checkpointing calls this inside a backward: only the outermost counts.
            if not hub.active or hub.backward_depth or torch.compiler.is_compiling():
                original(tensors, *args, **kwargs)
                return
            roots: Sequence[torch.Tensor] = (
                (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            )
            hub.emit("backward_begin", roots)
            hub.backward_depth += 1
            try:
                original(roots, *args, **kwargs)
            finally:
                hub.backward_depth -= 1
                hub.emit("backward_end")

        return backward

    patches.replace(torch.autograd, "backward", wrap)
