"""The batches of replicates: replicate r of R has the first of ``batches(r, R)``, whoever computes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from backlight.launch.recipe import Recipe
from backlight.monitors.spectra.instrument.batches import digest, samples, size
from backlight.monitors.spectra.instrument.rank_group import Team
from backlight.monitors.spectra.instrument.replicate_gradient import seed_by
from backlight.monitors.spectra.model.errors import SpectraError

KEPT = 8
"""Batches may take this part of the budget; beyond that they are drawn again for every backward."""


class ReplicateData:
    """Draws the batches of some of the replicates, again where they are not kept.

    Parameters
    ----------
    recipe
        Whose batches.
    replicates
        R.
    mine
        Numbers of those that are computed here.
    seed
        What the generators of torch, numpy and Python are seeded by before a batch is drawn.
    budget
        Bytes that batches and replicates together may take.
    """

    def __init__(
        self, recipe: Recipe, replicates: int, mine: Iterable[int], *, seed: int, budget: int
    ) -> None:
        self._recipe, self._replicates, self._seed = recipe, replicates, seed
        self._monitor = budget // KEPT
        self._kept: dict[int, Any] = {}
        self.digests: dict[int, str | None] = {}
        self.samples: dict[int, int | None] = {}
        for replicate in mine:
            batch = self._draw(replicate)
            self.digests[replicate], self.samples[replicate] = digest(batch), samples(batch)
            if size(batch) <= self._monitor:
                self._monitor -= size(batch)
                self._kept[replicate] = batch

    def batch(self, replicate: int) -> Any:
        """Return the batch of a replicate.

        Raises
        ------
        SpectraError
            If it was drawn again, and is another.
        """
        if replicate in self._kept:
            return self._kept[replicate]
        batch = self._draw(replicate)
        if digest(batch) != self.digests[replicate]:
            raise SpectraError(
                f"{self._recipe.path}: batches({replicate}, {self._replicates}) began with another batch "
                "when it was called again; let it give the same for the same arguments, or raise --budget"
            )
        return batch

    def _draw(self, replicate: int) -> Any:
        seed_by(self._seed, "batch", replicate)
        for batch in self._recipe.batches(replicate, self._replicates):
            return batch
        raise SpectraError(
            f"{self._recipe.path}: batches({replicate}, {self._replicates}) gave no batch; "
            f"{self._replicates} replicates need a batch each, of data of its own"
        )


def check_data(team: Team, recipe: Recipe, data: ReplicateData) -> tuple[float, str]:
    """Check that all replicates have batches of one size with data of their own, on every rank alike.

    Returns
    -------
    tuple[float, str]
        Samples of a batch, NaN where the batches hold no tensor, and what tells all of these batches from
        others, empty where that cannot be told.

    Raises
    ------
    SpectraError
        If two batches differ in size, or are the same.
    """
    sizes: dict[int, int | None] = {}
    digests: dict[int, str | None] = {}
    for theirs, others in team.everywhere((data.samples, data.digests)):
        sizes |= theirs
        digests |= others
    for replicate in sorted(sizes):
        if sizes[replicate] != sizes[0]:
            raise SpectraError(
                f"{recipe.path}: the batch of replicate {replicate} has {sizes[replicate]} samples, that of "
                f"replicate 0 has {sizes[0]}; replicates need batches of one size (drop_last=True, or fewer "
                "--replicates)"
            )
    seen: dict[str, int] = {}
    for replicate in sorted(digests):
        known = digests[replicate]
        if known is None:
            continue
        if known in seen:
            raise SpectraError(
                f"{recipe.path}: replicates {seen[known]} and {replicate} got the same batch, and would "
                "agree whatever the noise; batches(rank, world_size) must give each rank data of its own"
            )
        seen[known] = replicate
    whole = "" if None in digests.values() else " ".join(str(digests[r]) for r in sorted(digests))
    return (math.nan if sizes[0] is None else float(sizes[0])), whole
