"""Which models a script trains, and their outermost modules, whose forwards are reported by the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backlight.capture.hub import HUB, Forwards, Listener, parameters_of
from backlight.capture.modules import holding

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.capture.parameters import Scope


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
        """Remove all hooks."""
        self._forwards.leave()


class ScopeForwards(Listener):
    """Reports the forwards of the outermost modules that ``scope`` covers.

    A model is followed from the construction of its optimizer on, before its first forward; one that is
    wrapped later is followed by its wrapper as well.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._forwards = Forwards()

    def start(self, on_error: Callable[[Exception], None]) -> None:
        """Attach to what is known before any step; ``on_error`` is called if this fails later."""
        HUB.add(self, on_error)
        self._on_error = on_error
        self._scope.on_change.append(self._on_change)
        if self._scope.models:
            self._forwards.follow(self._scope.models)
            return
        known = HUB.optimizers.known()
        if known:
            HUB.seen.scan()  # once: each looks at every object of the process
        for optimizer in known:
            self._forwards.follow(_held_by(optimizer))

    def stop(self) -> None:
        """Remove all hooks."""
        HUB.remove(self)
        if self._on_change in self._scope.on_change:
            self._scope.on_change.remove(self._on_change)
        self._forwards.leave()

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the models that it holds: their first forward can be seen from here on."""
        if not self._scope.models:
            found = _held_by(optimizer)
            if not found:
                HUB.seen.scan()  # the model was built before anybody watched
                found = _held_by(optimizer)
            self._forwards.follow(found)

    def _on_change(self) -> None:
        held = {id(tensor) for tensor in self._scope.table.tensors()}
        try:
            self._forwards.follow(self._scope.models or holding(HUB.seen.roots(), held))
        except Exception as error:  # noqa: BLE001 - called by whatever refreshes the table
            self.stop()
            self._on_error(error)


def _held_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    return holding(HUB.seen.roots(), {id(tensor) for tensor in parameters_of(optimizer)})
