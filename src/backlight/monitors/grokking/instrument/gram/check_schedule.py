"""How often samples are run alone: at the first, second, fourth, eighth … measurement of one kind.

Whether samples are independent is a property of the model and the loss function, not of the numbers, with
exceptions that training brings about (a mixing layer that starts at zero). So the check comes back, ever
more rarely, as long as model, loss function, training mode and the shapes of the batch stay the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from backlight.monitors.grokking.instrument.gram import batches

_PASSED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Any, dict[Hashable, int]]]
_PASSED = weakref.WeakKeyDictionary()


class Repeats:
    """Measurements of one model by one loss function on batches of one shape.

    A loss function is known by its identity, a bound method by that of its object. One that is made anew
    for each measurement, or cannot be referred to weakly, is new each time.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> None:
        function = getattr(loss_fn, "__func__", None)
        self._kind = (
            function,
            tuple((place, tensor.shape, tensor.dtype) for place, tensor in batches.tensors(batch)),
            tuple(module.training for module in model.modules()),
            tuple(parameter.requires_grad for parameter in model.parameters()),
            torch.is_autocast_enabled(),
        )
        owner = loss_fn if function is None else loss_fn.__self__  # type: ignore[attr-defined]
        try:
            self._counts = _PASSED.setdefault(model, weakref.WeakKeyDictionary()).setdefault(owner, {})
        except TypeError:
            self._counts = {}

    def due(self) -> bool:
        """Whether samples are to be run alone at this measurement."""
        number = self._counts.get(self._kind, 0) + 1
        return number & (number - 1) == 0

    def passed(self) -> None:
        """Note a measurement in which nothing spoke against independence."""
        self._counts[self._kind] = self._counts.get(self._kind, 0) + 1
