"""Gradient scaling: when gradients are unscaled, whether the step was skipped, what the loss was.

With a fused optimizer the gradients are still scaled inside ``step``, and whether the step is
skipped is decided on the device: both are tensors on the optimizer, read late.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from backlight.capture.hooks.patch import Patches
    from backlight.capture.hub import Hub


def install(hub: Hub, patches: Patches) -> None:
    """Report ``scale``, ``unscale_`` and ``step`` of every gradient scaler to the hub."""

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale(self: Any, outputs: Any) -> Any:
            result = original(self, outputs)
            if hub.active and self.is_enabled() and isinstance(outputs, torch.Tensor):
                hub.emit("scaled", outputs, result)
            return result

        return scale

    def wrap_unscale(original: Any) -> Any:
        @functools.wraps(original)
        def unscale_(self: Any, optimizer: Any) -> None:
            original(self, optimizer)
            if hub.active and self.is_enabled():
                hub.optimizers.use(optimizer)
                hub.emit("unscaled", self, optimizer)

        return unscale_

    def wrap_step(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or not self.is_enabled():
                return original(self, optimizer, *args, **kwargs)
            hub.optimizers.use(optimizer)
            watcher = _Called(optimizer)
            hub.emit("scaler_begin", self, optimizer)
            try:
                return original(self, optimizer, *args, **kwargs)
            finally:
                hub.emit("scaler_end", self, optimizer, stepped=watcher.called())

        return step

    scaler = torch.amp.grad_scaler.GradScaler
    patches.replace(scaler, "scale", wrap_scale)
    patches.replace(scaler, "unscale_", wrap_unscale)
    patches.replace(scaler, "step", wrap_step)


class _Called:
    """Tells whether the optimizer's step ran, by a hook of that one call."""

    def __init__(self, optimizer: Any) -> None:
        self._called = False
        self._handle = optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._called = True

    def called(self) -> bool:
        """Take the hook off and return whether the step ran."""
        self._handle.remove()
        return self._called


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return the scaler's scale tensor, or None where a release hides it."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None
