"""Steps of every optimizer, through torch's global step hooks, and which optimizers exist.

With a closure (L-BFGS) the gradients appear inside ``step``: the pre-hook replaces the closure by
one that reports after each evaluation.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from backlight.capture.hub import Hub
    from backlight.capture.patching import Patches


class SeenOptimizers:
    """Weak references to the optimizers of this process, in the order of their creation."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[torch.optim.Optimizer]] = []

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember ``optimizer`` unless it is known."""
        if all(reference() is not optimizer for reference in self._references):
            self._references.append(weakref.ref(optimizer))

    def scan(self) -> None:
        """Look for optimizers that were made before the hooks were there."""
        for candidate in gc.get_objects():
            # type() first: isinstance() on a stranger may run its __class__ property.
            if issubclass(type(candidate), torch.optim.Optimizer):
                self.add(candidate)

    def alive(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that still exist and have parameter groups."""
        self._references = [r for r in self._references if r() is not None]
        found = [reference() for reference in self._references]
        return [o for o in found if o is not None and getattr(o, "param_groups", None)]


def install(hub: Hub, patches: Patches) -> list[Any]:
    """Report optimizer steps to the hub; return the handles that take the hooks off."""

    def wrap_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            if hub.active:
                hub.optimizers.add(self)

        return __init__

    patches.replace(torch.optim.Optimizer, "__init__", wrap_init)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not hub.active:
            return None
        hub.optimizers.add(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            hub.emit("optimizer_begin", optimizer, has_closure=False)
            return None
        hub.emit("optimizer_begin", optimizer, has_closure=True)
        reporting = _reporting(hub, optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": reporting}
        return (args[0], reporting, *args[2:]), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if hub.active:
            hub.emit("optimizer_end", optimizer)

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]


def _reporting(hub: Hub, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(closure)
    def evaluate() -> Any:
        loss = closure()
        if hub.active:
            hub.emit("closure_end", optimizer)
        return loss

    return evaluate
