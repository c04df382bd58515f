"""Who measures which layer, and how many layers are held at once: arithmetic on sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def cost(rows: int, columns: int) -> int:
    """Return what decomposing a matrix costs, up to a factor: ``min^2 max``."""
    return min(rows, columns) ** 2 * max(rows, columns)


def longest_first(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the owner of each layer: the longest first, each to the rank with the least to do so far.

    Graham's rule for scheduling on parallel machines (SIAM J. Appl. Math. 17, 1969): the busiest rank has at
    most 4/3 of what the best schedule gives it. Ties go to the layer and the rank that come first.
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
    """Layers whose replicates are held at the same time.

    Attributes
    ----------
    layers
        Which, the costliest first.
    owners
        The rank that measures each of them.
    """

    layers: tuple[int, ...]
    owners: tuple[int, ...]


def sweeps(
    costs: Sequence[int], sizes: Sequence[int], *, replicates: int, ranks: int, budget: int
) -> tuple[Sweep, ...]:
    """Put layers into sweeps that fit the budget, every layer into one.

    Before a sweep is exchanged a rank holds its share of the replicates of all its layers, after that all
    replicates of those that it owns. On several ranks each of the two gets half of the budget, on one they
    are the same. A layer that does not fit is alone in its sweep: no rank then holds more than R of it.

    Parameters
    ----------
    costs
        See :func:`cost`.
    sizes
        Bytes of one replicate of each layer.
    replicates, ranks
        How many there are.
    budget
        Bytes that replicates may take on a rank.
    """
    owners = longest_first(costs, ranks)
    limit = budget if ranks == 1 else budget // 2
    share = math.ceil(replicates / ranks)
    open_ones: list[_Filling] = []
    alone: list[list[int]] = []
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owned, held = replicates * sizes[index], share * sizes[index]
        if owned > limit:
            alone.append([index])
            continue
        place = next((f for f in open_ones if f.fits(owners[index], owned, held, limit)), None)
        if place is None:
            place = _Filling([], [0] * ranks, 0)
            open_ones.append(place)
        place.layers.append(index)
        place.owned[owners[index]] += owned
        place.held += held
    return tuple(
        Sweep(tuple(layers), tuple(owners[i] for i in layers))
        for layers in [*alone, *(f.layers for f in open_ones)]
    )


@dataclass
class _Filling:
    layers: list[int]
    owned: list[int]
    held: int

    def fits(self, owner: int, owned: int, held: int, limit: int) -> bool:
        return self.owned[owner] + owned <= limit and self.held + held <= limit
