"""Begin and end of the forward of outermost modules.

The functions that sit on a module are of this file, not closures, so that the module can still be
copied and pickled. A module that was compiled in place is left alone: a hook could make it compile again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hooks.optimizers import parameters_of
from backlight.capture.hub import HUB
from backlight.capture.modules import holding

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.scope import Scope


class Forwards:
    """Hooks on outermost modules, which report to the hub; take them off with :meth:`leave`."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}

    def follow(self, modules: Iterable[torch.nn.Module]) -> None:
        """Hook these modules as well.

        One that was hooked before it was wrapped keeps its hooks: it may have been compiled with them.
        """
        for key in [k for k, (reference, _) in self._handles.items() if reference() is None]:
            del self._handles[key]
        for module in modules:
            if id(module) not in self._handles and getattr(module, "_compiled_call_impl", None) is None:
                handles = [
                    module.register_forward_pre_hook(entered),
                    module.register_forward_hook(returned, always_call=True),
                ]
                self._handles[id(module)] = (weakref.ref(module), handles)

    def leave(self) -> None:
        """Take all hooks off."""
        for key in list(self._handles):
            self._drop(key)

    def _drop(self, key: int) -> None:
        for handle in self._handles.pop(key)[1]:
            handle.remove()


class TrainedModels:
    """The models that a script trains, found as they become known, with their forwards followed.

    Attributes
    ----------
    models:
        What is known so far.
    """

    def __init__(self, scope: Scope) -> None:
        self.models: list[nn.Module] = []
        self._scope = scope
        self._forwards = Forwards()
        self._known: object = None

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the models that a new optimizer holds."""
        held = {id(tensor) for tensor in parameters_of(optimizer)}
        known = {id(model) for model in self.models}
        self.models += [m for m in holding(HUB.seen.roots(), held) if id(m) not in known]
        self._forwards.follow(self.models)

    def of_scope(self) -> None:
        """Take the models whose parameters are trained, where those are others than before."""
        if self._scope.table is not self._known:
            self._known = self._scope.table
            held = {id(tensor) for tensor in self._scope.table.tensors()}
            self.models = holding(HUB.seen.roots(), held)
            self._forwards.follow(self.models)

    def leave(self) -> None:
        """Take all hooks off."""
        self._forwards.leave()


def entered(_module: torch.nn.Module, _args: Any) -> None:
    """Hook before the forward of an outermost module."""
    if not torch.compiler.is_compiling():
        HUB.emit("forward_begin")


def returned(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
    """Hook after the forward of an outermost module, also when it raised."""
    if not torch.compiler.is_compiling():
        HUB.emit("forward_end")
