"""The owner of each layer, and the layers that are held at once: arithmetic on sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def cost(rows: int, columns: int) -> int:
    """Return the cost of decomposing a matrix, up to a factor: ``min^2 max``."""
    return min(rows, columns) ** 2 * max(rows, columns)


def longest_first(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the owner of each layer: the longest first, each to the rank with the least to do so far.

    Graham's rule for scheduling on parallel machines (SIAM J. Appl. Math. 17, 1969): the busiest rank has at
    most 4/3 of its work in the best schedule. Ties go to the first layer and the first rank.
    """
    load = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += costs[index]
    return tuple(owners)


@dataclass(frozen=True)
class Sweep:
    """Layers whose replicates are held at the same time, costliest first, and the rank that measures each."""

    layers: tuple[int, ...]
    owners: tuple[int, ...]


def sweeps(
    costs: Sequence[int], sizes: Sequence[int], *, replicates: int, ranks: int, budget: int
) -> tuple[Sweep, ...]:
    """Assign every layer to a sweep that fits the budget, in bytes on a rank.

    Before the replicates are sent a rank holds its share of those of all layers of the sweep, afterwards all
    replicates of the layers that it owns. On several ranks each of the two gets half of the budget, on one
    they are the same. A layer that does not fit has its own sweep: no rank then holds more than R of it.
    ``costs`` see :func:`cost`; ``sizes`` are the bytes of one replicate of each layer.
    """
    owners = longest_first(costs, ranks)
    limit = budget if ranks == 1 else budget // 2
    share = math.ceil(replicates / ranks)
    open_sweeps: list[_OpenSweep] = []
    alone: list[list[int]] = []
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owned, held = replicates * sizes[index], share * sizes[index]
        if owned > limit:
            alone.append([index])
            continue
        sweep = next((s for s in open_sweeps if s.fits(owners[index], owned, held, limit)), None)
        if sweep is None:
            sweep = _OpenSweep([], [0] * ranks, 0)
            open_sweeps.append(sweep)
        sweep.layers.append(index)
        sweep.owned[owners[index]] += owned
        sweep.held += held
    return tuple(
        Sweep(tuple(layers), tuple(owners[i] for i in layers))
        for layers in [*alone, *(s.layers for s in open_sweeps)]
    )


@dataclass
class _OpenSweep:
    layers: list[int]
    owned: list[int]
    held: int

    def fits(self, owner: int, owned: int, held: int, limit: int) -> bool:
        return self.owned[owner] + owned <= limit and self.held + held <= limit
