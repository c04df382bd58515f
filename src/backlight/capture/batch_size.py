"""How many samples the outermost modules are called with, where gradients are wanted.

As in :mod:`backlight.capture.forward`, what sits on a module is a function of this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from backlight.capture.hub import HUB


class Inputs:
    """Hooks on outermost modules that report to the hub; take them off with :meth:`leave`."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def follow(self, modules: Iterable[torch.nn.Module]) -> None:
        """Hook these modules instead of those before; one that was compiled in place is left alone."""
        self.leave()
        self._handles = [
            module.register_forward_pre_hook(given, with_kwargs=True)
            for module in modules
            if getattr(module, "_compiled_call_impl", None) is None
        ]

    def leave(self) -> None:
        """Take all hooks off."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()


def given(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Hook before the forward of an outermost module."""
    if HUB.active and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        HUB.emit("samples_given", _samples((args, kwargs)))


def _samples(batch: Any) -> int | None:
    """Return the length of the first tensor that has one."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    held = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for one in held if (n := _samples(one)) is not None), None)
