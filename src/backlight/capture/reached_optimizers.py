"""Which of several optimizers a backward gives gradients to: the losses of two networks are two curves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from backlight.capture.seen_optimizers import parameters_of

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable, Scope

PROBES = 4
"""Parameters of each optimizer whose gradients are followed, evenly spaced: to look at all costs too much."""

State = tuple[tuple[int, int] | None, ...]
"""Gradient of each probe as identity and version; None where there is none."""


class ReachedOptimizers:
    """Compares the gradients of some parameters of each optimizer before and after a backward."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._table: ParameterTable | None = None
        self._probes: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._before: dict[int, State] = {}
        self._left: dict[int, State] = {}

    def begin(self) -> None:
        """Look at the gradients: a backward begins."""
        if self._table is not self._scope.table:
            self._table = self._scope.table
            self._probes = dict(self._choose())
        self._before = {number: _state(probes) for number, probes in self._probes.items()}

    def end(self) -> Mapping[int, bool]:
        """Return the numbers of the optimizers whose gradients the backward changed.

        True where they hold that of earlier ones as well, which nothing has cleared in between.
        """
        found = {}
        for number, before in self._before.items():
            after = _state(self._probes[number])
            if any(new is not None and new != old for new, old in zip(after, before, strict=True)):
                left = self._left.get(number, ())
                found[number] = any(old is not None and old in left for old in before)
                self._left[number] = after
        return found

    def _choose(self) -> Iterator[tuple[int, list[weakref.ref[torch.Tensor]]]]:
        for optimizer in self._scope.optimizers():
            listed = parameters_of(optimizer)
            listed = [p for p in listed if p.requires_grad] or listed
            rows = {round(i * (len(listed) - 1) / (PROBES - 1)) for i in range(PROBES)} if listed else set()
            yield self._scope.number(optimizer), [weakref.ref(listed[row]) for row in sorted(rows)]


def _state(probes: list[weakref.ref[torch.Tensor]]) -> State:
    gradients = [None if (p := reference()) is None else p.grad for reference in probes]
    return tuple([None if g is None else (id(g), g._version) for g in gradients])
