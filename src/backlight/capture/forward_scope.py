"""Follows the outermost modules of a watch, so that every monitor hears of forwards through the hub.

A model is followed from the making of its optimizer on, before its first forward; one that is wrapped
later is followed by its wrapper as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from backlight.capture.events import Listener
from backlight.capture.forward import Forwards
from backlight.capture.hooks.optimizers import parameters_of
from backlight.capture.hub import HUB
from backlight.capture.modules import holding

if TYPE_CHECKING:
    import torch

    from backlight.capture.scope import Scope


class Following(Listener):
    """Hooks what ``scope`` covers; takes everything off again with :meth:`stop`.

    Parameters
    ----------
    scope:
        What is watched.
    on_dropped:
        Called with the error by which this was taken off.
    """

    def __init__(self, scope: Scope, on_dropped: Callable[[Exception], None]) -> None:
        self._scope = scope
        self._on_dropped = on_dropped
        self._forwards = Forwards()
        self._table: object = scope.table

    def start(self) -> None:
        """Attach, and follow what is known before any step of a training."""
        HUB.add(self)
        if self._scope.models:
            self._forwards.follow(self._scope.models)
            return
        known = HUB.optimizers.known()
        if known:
            HUB.seen.scan()  # once: each looks at every object of the process
        for optimizer in known:
            self._forwards.follow(_held_by(optimizer))

    def stop(self) -> None:
        """Take all hooks off."""
        HUB.remove(self)
        self._forwards.leave()

    def dropped(self, error: Exception) -> None:
        """Take the hooks off, and pass the error on."""
        self._forwards.leave()
        self._on_dropped(error)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the models that it holds: their first forward can be seen from here on."""
        if not self._scope.models:
            found = _held_by(optimizer)
            if not found:
                HUB.seen.scan()  # the model was built before anybody watched
                found = _held_by(optimizer)
            self._forwards.follow(found)

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Look again where the parameters are others, or are known for the first time."""
        if self._scope.table is not self._table:
            self._table = self._scope.table
            held = {id(tensor) for tensor in self._scope.table.tensors()}
            self._forwards.follow(self._scope.models or holding(HUB.seen.roots(), held))


def _held_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    return holding(HUB.seen.roots(), {id(tensor) for tensor in parameters_of(optimizer)})
