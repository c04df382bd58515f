"""Digests of the weights and gradients that other ranks may hold as well."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.parameters import local
from backlight.capture.replicas import replicas, wrappers
from backlight.capture.seen_optimizers import parameters_of
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.tensor_digests import digests_and_norms
from backlight.monitors.correctness.model.digests import ABSENT, DIGESTS, FOLLOWED, encoded, norms_of
from backlight.records import Layout

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule


class ReplicaDigests(Check):
    """Records digests of all whole or replicated parameters at observed steps, where there are several ranks.

    Weights are read before the first forward of a step, after all that belongs to the one before; gradients
    as the optimizer meets them. Ranks are compared by the rule ``replicas_differ``: no collective is needed.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._table: ParameterTable | None = None
        self._rows: list[int] = []  # of the table
        self._wrappers: list[weakref.ref[Any]] = []
        self._joins: list[Any] = []
        self._backwards = 0
        self._step = -1  # whose weights have been read
        self._is_unsynced = False
        self._is_off = run.world_size < 2

    def forward_begin(self) -> None:
        """Read the weights of this step."""
        if torch.is_grad_enabled() and not HUB.backward_depth:
            self._read_weights()

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Read the weights where no forward was reported."""
        self._read_weights()
        self._backwards += 1
        self._is_unsynced = any(
            not getattr(one(), "require_backward_grad_sync", True) for one in self._wrappers
        )

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the gradients that this optimizer uses."""
        if not self.due or self._is_off or has_closure or HUB.backward_depth or self._table is None:
            return
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        tensors = [self._table.tensor(row) for row in self._rows]
        self._record(
            "gradients", [None if p is None or id(p) not in held else _comparable(p) for p in tensors]
        )

    def _read_weights(self) -> None:
        step = self.run.clock.index
        if self._is_off or not self.due or step == self._step or is_transforming():
            return
        self._step = step
        scope = self.run.scope
        if self._table is not scope.table or not self._rows:
            self._follow()
        if self._has_joined_again():
            # Ranks with fewer batches took fewer steps: equal numbers mean different steps from here on.
            self._is_off = True
            return
        table = scope.table
        self._record(
            "weights", [None if (p := table.tensor(row)) is None else local(p) for row in self._rows]
        )

    def _follow(self) -> None:
        """Note which parameters are read, and which of them are promised to be equal."""
        scope = self.run.scope
        if self._table is None and scope.has_models:
            HUB.seen.scan()  # once: DDP may have been built before the hooks were there
        scope.refresh()
        self._table = table = scope.table
        roots = {id(root): root for root in [*scope.models, *HUB.seen.roots()]}.values()
        self._wrappers = [weakref.ref(one) for one in wrappers(roots)]
        self._joins = [getattr(one(), "_join_config", None) for one in self._wrappers]
        self._rows = [
            row
            for row, record in enumerate(table.records)
            if record.placement.layout in {Layout.WHOLE, Layout.REPLICATE} or record.placement.replicas > 1
        ]
        found = replicas(roots, table.tensors())
        promises: dict[Any, list[int]] = {}
        for number, row in enumerate(self._rows):
            if (promise := found.get(id(table.tensor(row)))) is not None:
                promises.setdefault(promise, []).append(number)
        self.run.notifier.event(
            FOLLOWED,
            {
                "names": [table.records[row].name for row in self._rows],
                "promises": [
                    {"by": one.by, "ranks": one.ranks, "exact": one.is_exact, "rows": rows}
                    for one, rows in promises.items()
                ],
            },
            self._step,
        )

    def _has_joined_again(self) -> bool:
        """Return whether a second context of uneven inputs has begun."""
        now = [getattr(one(), "_join_config", None) for one in self._wrappers]
        before, self._joins = self._joins, now
        return any(
            one is not other and getattr(one, "enable", False) for one, other in zip(before, now, strict=True)
        )

    def _record(self, moment: str, tensors: Sequence[Tensor | None]) -> None:
        if is_capturing_graph():
            return
        device = next((one.device for one in tensors if one is not None), None)
        rows = [
            (row, one.detach())
            for row, one in enumerate(tensors)
            if one is not None and one.device == device and one.layout is torch.strided and one.numel()
        ]
        if not rows:
            return
        table = digests_and_norms([one for _, one in rows])
        facts = {"moment": moment, "backwards": self._backwards, "unsynced": self._is_unsynced}
        step, size = self.run.clock.index, len(tensors)

        def store(known: NDArray[np.generic]) -> None:
            digests_P, norms_P = np.zeros(size, np.int64), np.full(size, ABSENT, np.float32)
            here = [row for row, _ in rows]
            digests_P[here] = known[0].astype(np.int64)
            norms_P[here] = norms_of(known[1])
            self.run.notifier.event(DIGESTS, {**facts, **encoded(digests_P, norms_P)}, step)

        self.when_known(store, table)


def _comparable(parameter: Tensor) -> Tensor | None:
    """Return the local gradient, None where ranks may hold different parts of it: a partial sum, a shard."""
    gradient = parameter.grad
    if gradient is None or getattr(gradient, "placements", None) is not None:
        return None
    return gradient
