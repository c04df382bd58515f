"""The outermost modules of the watched models, whose forwards the hub reports."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.call_hooks import CallHooks
from backlight.capture.hub import HUB, Listener
from backlight.capture.modules import holding
from backlight.capture.optimizers import parameters_of
from backlight.interrupts import is_interrupt

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import Scope


class Forwards(CallHooks):
    """Reports the calls of the outermost modules to the hub."""

    def __init__(self) -> None:
        super().__init__(_begin, _end)


def _begin(module: nn.Module, args: Any, kwargs: Any) -> None:
    HUB.forward_depth += 1
    try:
        HUB.emit("forward_begin", module, args, kwargs)
    except BaseException:  # an interrupt, after which no end is reported
        HUB.forward_depth -= 1
        raise


def _end(module: nn.Module, result: Any) -> None:
    try:
        HUB.emit("forward_end", module, result)
    finally:
        HUB.forward_depth = max(HUB.forward_depth - 1, 0)


class ScopeForwards(Listener):
    """Reports the forwards of the outermost modules that ``scope`` covers.

    A model is followed from the construction of its optimizer on, before its first forward; one that is
    wrapped later is followed by its wrapper as well. A command ``keeps`` the models for when the script has
    ended; a watch keeps none of them alive.
    """

    every_step = False

    def __init__(self, scope: Scope, *, keeps: bool = False) -> None:
        self._scope, self._keeps = scope, keeps
        self._forwards = Forwards()
        self._know(scope.models)

    @property
    def models(self) -> list[nn.Module]:
        """The models that are known so far and exist."""
        return [model for reference in self._models if (model := reference()) is not None]

    def _know(self, models: list[nn.Module]) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._kept = models if self._keeps else []

    def start(self, on_error: Callable[[Exception], None]) -> None:
        """Attach to what is known before any step; ``on_error`` is called if this fails later."""
        HUB.add(self, on_error)
        self._on_error = on_error
        self._scope.on_change.append(self._on_change)
        if self._scope.has_models:
            self._forwards.follow(self.models)
            return
        optimizers = HUB.optimizers.existing()
        if optimizers:
            HUB.seen.scan()  # once: a scan visits every object of the process
        for optimizer in optimizers:
            self._follow_held(optimizer)

    def stop(self) -> None:
        """Remove all hooks."""
        HUB.remove(self)
        if self._on_change in self._scope.on_change:
            self._scope.on_change.remove(self._on_change)
        self._forwards.leave()

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the models whose parameters it holds, from their first forward on."""
        if not self._scope.has_models and not self._follow_held(optimizer):
            HUB.seen.scan()  # the model was built before the watch began
            self._follow_held(optimizer)

    def _follow_held(self, optimizer: torch.optim.Optimizer) -> bool:
        roots = holding(HUB.seen.roots(), {id(tensor) for tensor in parameters_of(optimizer)})
        models = self.models
        self._know([*models, *(model for model in roots if all(model is not m for m in models))])
        self._forwards.follow(roots)
        return bool(roots)

    def _on_change(self) -> None:
        held_ids = {id(tensor) for tensor in self._scope.table.tensors()}
        try:
            roots = self._scope.roots(held_ids)
            self._know(roots)
            self._forwards.follow(roots)
        except Exception as error:
            if is_interrupt(error):
                raise
            self.stop()
            self._on_error(error)
