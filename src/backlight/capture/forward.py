"""The outermost modules of the watched models, whose forwards the hub reports."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hub import HUB, Listener, forward_begin, forward_end, parameters_of
from backlight.capture.modules import holding

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import Scope


class Forwards:
    """Hooks on outermost modules, which report to the hub; remove them with :meth:`leave`."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Hook these modules as well.

        One that was hooked before it was wrapped keeps its hooks: it may have been compiled with them.
        """
        for key in [k for k, (reference, _) in self._handles.items() if reference() is None]:
            del self._handles[key]
        for module in modules:
            if id(module) not in self._handles and getattr(module, "_compiled_call_impl", None) is None:
                handles = [
                    module.register_forward_pre_hook(forward_begin),
                    module.register_forward_hook(forward_end, always_call=True),
                ]
                self._handles[id(module)] = (weakref.ref(module), handles)

    def leave(self) -> None:
        """Remove all hooks."""
        for _, handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()


class ScopeForwards(Listener):
    """Reports the forwards of the outermost modules that ``scope`` covers.

    A model is followed from the construction of its optimizer on, before its first forward; one that is
    wrapped later is followed by its wrapper as well.

    Attributes
    ----------
    models:
        The models that are known so far.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._forwards = Forwards()
        self.models: list[nn.Module] = list(scope.models)

    def start(self, on_error: Callable[[Exception], None]) -> None:
        """Attach to what is known before any step; ``on_error`` is called if this fails later."""
        HUB.add(self, on_error)
        self._on_error = on_error
        self._scope.on_change.append(self._on_change)
        if self._scope.models:
            self._forwards.follow(self.models)
            return
        known = HUB.optimizers.known()
        if known:
            HUB.seen.scan()  # once: a scan visits every object of the process
        for optimizer in known:
            self._follow_held(optimizer)

    def stop(self) -> None:
        """Remove all hooks."""
        HUB.remove(self)
        if self._on_change in self._scope.on_change:
            self._scope.on_change.remove(self._on_change)
        self._forwards.leave()

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the models whose parameters it holds, from their first forward on."""
        if not self._scope.models and not self._follow_held(optimizer):
            HUB.seen.scan()  # the model was built before the watch began
            self._follow_held(optimizer)

    def _follow_held(self, optimizer: torch.optim.Optimizer) -> bool:
        found = holding(HUB.seen.roots(), {id(tensor) for tensor in parameters_of(optimizer)})
        self.models += [model for model in found if all(model is not known for known in self.models)]
        self._forwards.follow(found)
        return bool(found)

    def _on_change(self) -> None:
        held = {id(tensor) for tensor in self._scope.table.tensors()}
        try:
            self.models = self._scope.models or holding(HUB.seen.roots(), held)
            self._forwards.follow(self.models)
        except Exception as error:  # noqa: BLE001 - called by whatever refreshes the table
            self.stop()
            self._on_error(error)
