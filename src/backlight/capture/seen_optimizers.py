"""The optimizers of this process, which of them are in use, and what they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from backlight.capture import engines, modules


class SeenOptimizers:
    """Weak references to the optimizers of this process, in the order in which they were met.

    One that a scan found may belong to a run that is over: it counts as soon as it is used. ``goes_on`` is
    whether the closure of the step in progress adds the last microbatch to gradients that are there.
    """

    goes_on = False

    def __init__(self) -> None:
        self._references: list[weakref.ref[torch.optim.Optimizer]] = []
        self._in_use: set[int] = set()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()

    def use_engine(self, engine: engines.EngineOptimizer) -> None:
        """Remember the optimizer of an engine, and that the one inside it does not step on its own."""
        self._parts.add(engine.inner)
        self.use(engine)  # type: ignore[arg-type]  # it has what is used of one

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember ``optimizer``, which was just made or is being used."""
        self._meet(optimizer)
        self._in_use.add(id(optimizer))

    def set_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Count ``optimizer`` as not used: another thread trains with it, and writes its gradients meanwhile.

        torch guards ``.grad`` by no lock: to read it while a backward of another thread sets it may crash.
        """
        self._in_use.discard(id(optimizer))

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        for reference in self._references:
            if reference() is optimizer:
                return
        self._in_use.discard(id(optimizer))  # the id of one that is gone
        self._references.append(weakref.ref(optimizer))

    def scan(self) -> None:
        """Look for optimizers that were made before the hooks were there."""
        for optimizer in modules.live_objects(torch.optim.Optimizer):
            self._meet(optimizer)

    def use_holders(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count every optimizer that holds one of ``tensors`` as used."""
        wanted = {id(tensor) for tensor in tensors}
        for optimizer in self.known():
            if any(id(p) in wanted or id(p.grad) in wanted for p in parameters_of(optimizer)):
                self._in_use.add(id(optimizer))

    def rest(self) -> None:
        """Count none as used any more: watching has ended."""
        self._in_use.clear()

    def alive(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that exist and are in use."""
        return [optimizer for optimizer in self.known() if id(optimizer) in self._in_use]

    def is_any_alive(self) -> bool:
        """Return whether :meth:`alive` has any."""
        for reference in self._references:
            if id(reference()) in self._in_use and reference() is not None:
                return True
        return False

    def known(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that exist, in use or not."""
        self._references = [r for r in self._references if r() is not None]
        found = [reference() for reference in self._references]
        parts = self._parts
        return [o for o in found if o is not None and o not in parts and getattr(o, "param_groups", None)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that ``optimizer`` holds, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
