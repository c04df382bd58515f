"""The moment at which a model is freed: the last one at which the gradients of its last step can be read.

The callback of a weak reference is called before the attributes of its object go. A model that only the
garbage collector frees has lost its parameters by then.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from backlight.capture.hub import HUB
from backlight.interrupts import call_from_callback

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import Scope

STEPS_EACH = 16
"""Training steps for each freed model that is measured: some loops wrap their model anew in every step."""


class FreedModels:
    """Delivers ``model_freed`` when a model of ``scope`` is freed in the thread that trains."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._models: list[weakref.ref[nn.Module]] = []
        self._measured = 0
        scope.on_change.append(self._follow)

    def forget(self) -> None:
        """Follow no model any more."""
        self._models = []

    def is_due(self, step: int) -> bool:
        """Return whether enough steps have passed for one more model; count it."""
        is_due = step >= STEPS_EACH * self._measured
        self._measured += is_due
        return is_due

    def _follow(self) -> None:
        models = self._scope.roots(set(self._scope.table.rows))
        self._models = [weakref.ref(model, self._freed) for model in models]

    def _freed(self, _: weakref.ref[nn.Module]) -> None:
        if threading.get_ident() != HUB.training.ident or HUB.is_emitting:
            return
        call_from_callback(self._deliver)

    @staticmethod
    def _deliver() -> None:
        HUB.resume()
        HUB.timed_steps = 1
        HUB.emit("model_freed")
