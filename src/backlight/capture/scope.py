"""What a watch covers: given models and optimizers, or everything that trains in the process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from backlight.capture.hooks.optimizers import parameters_of
from backlight.capture.hub import HUB
from backlight.capture.modules import Prefixes, named_parameters
from backlight.capture.parameters import ParameterTable, build_table

if TYPE_CHECKING:
    import torch
    from torch import nn


class Scope:
    """The models and optimizers of one watch, and their parameter table.

    Parameters
    ----------
    models:
        Models to watch; empty for every model of the process.
    optimizers:
        Optimizers to watch; empty for every one that holds a parameter of ``models``, or for all.
    """

    def __init__(
        self, models: Sequence[nn.Module] = (), optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self.models = list(models)
        self._given = list(optimizers)
        self._changes = -1
        self._groups: tuple[int, ...] = ()
        self._numbers: dict[int, int] = {}
        self._orphan_rows: list[int] = []
        self._prefixes = Prefixes()
        self.table = ParameterTable((), ())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the scope that exist now, in a stable order."""
        if self._given:
            return self._given
        alive = HUB.optimizers.alive()
        if not self.models:
            return alive
        own = {id(n.parameter) for model in self.models for n in named_parameters(model)}
        return [o for o in alive if any(id(p) in own for p in parameters_of(o))]

    def refresh(self) -> bool:
        """Bring the table up to date if modules, optimizers or their groups changed; True if so."""
        if self._changes == HUB.seen.changes and self._groups == self._signature():
            return False
        return self._rebuild()

    def _rebuild(self) -> bool:
        optimizers = self.optimizers()
        self._numbers = self._numbered(optimizers)
        table = build_table(self.models, optimizers, HUB.seen, self._prefixes)
        self._changes, self._groups = HUB.seen.changes, self._signature()
        changed = table.records != self.table.records or table.rows != self.table.rows
        self.table = table
        self._orphan_rows = [
            row for row, record in enumerate(table.records) if record.requires_grad and not record.group
        ]
        return changed

    def _numbered(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
        # Who had a number keeps it: learning rates are recorded under it.
        numbers = {id(o): self._numbers[id(o)] for o in optimizers if id(o) in self._numbers}
        free = (n for n in itertools.count() if n not in set(numbers.values()))
        return {id(o): numbers[id(o)] if id(o) in numbers else next(free) for o in optimizers}

    def alone(self) -> bool:
        """Whether there is one optimizer only, so that its step ends the training's step."""
        return len(self._numbers) == 1

    def _signature(self) -> tuple[int, ...]:
        # Cheap enough for every step: a changed group is another list or has another length.
        alive = self._given or HUB.optimizers.alive()
        return tuple(
            key for o in alive for g in o.param_groups for key in (id(o), id(g["params"]), len(g["params"]))
        )

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the scope covers ``optimizer``."""
        if self._given:
            return any(optimizer is given for given in self._given)
        if id(optimizer) not in self._numbers:
            self.refresh()
        return id(optimizer) in self._numbers

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number under which the optimizer's learning rates are recorded."""
        return self._numbers.get(id(optimizer), 0)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the table has a row for ``tensor``."""
        return self.table.row(tensor) is not None

    def parameters(self) -> list[torch.Tensor]:
        """Return every parameter of the scope that is alive."""
        return self.table.tensors()

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters that ``optimizer`` holds now, each of which then has a row."""
        parameters = parameters_of(optimizer)
        if self.table.missing(parameters):
            self._rebuild()  # a tensor was exchanged inside a list of the same length
        return parameters

    def orphans(self) -> list[torch.Tensor]:
        """Return parameters that want a gradient but that no optimizer of the scope holds."""
        return [t for row in self._orphan_rows if (t := self.table.tensor(row)) is not None]
