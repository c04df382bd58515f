"""One checkpoint: batches and gradients of the replicates, sent to the owners of layers and measured there.

Replicate r of R has the first batch of ``batches(r, R)``, whichever rank computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import digest, moved, nbytes, samples
from backlight.diagnose.spectra.options import SpectraRequest
from backlight.launch.recipe import Recipe
from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.randomized_svd import stable_rank
from backlight.monitors.spectra.instrument.layers import matrices
from backlight.monitors.spectra.instrument.rank_group import RankGroup
from backlight.monitors.spectra.instrument.replicate_gradient import gradients, seed_by
from backlight.monitors.spectra.instrument.worker_thread import cost, longest_first
from backlight.monitors.spectra.model.echo_records import record_arrays, record_measured
from backlight.monitors.spectra.settings import SpectraError
from backlight.store.spectra import Layer
from backlight.store.write.writer import RunWriter


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
    replicates of the layers that it owns: on several ranks each of the two gets half of the budget. A layer
    that does not fit has its own sweep. ``sizes`` are the bytes of one replicate of each layer.
    """
    owners = longest_first(costs, ranks)
    limit = budget if ranks == 1 else budget // 2
    share = math.ceil(replicates / ranks)
    open_sweeps: list[_OpenSweep] = []
    alone: list[list[int]] = []
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owned, part = replicates * sizes[index], share * sizes[index]
        if owned > limit:
            alone.append([index])
            continue
        sweep = next((s for s in open_sweeps if s.fits(owners[index], owned, part, limit)), None)
        if sweep is None:
            sweep = _OpenSweep([], [0] * ranks, 0)
            open_sweeps.append(sweep)
        sweep.layers.append(index)
        sweep.owned[owners[index]] += owned
        sweep.part += part
    return tuple(
        Sweep(tuple(layers), tuple(owners[i] for i in layers))
        for layers in [*alone, *(s.layers for s in open_sweeps)]
    )


@dataclass
class _OpenSweep:
    layers: list[int]
    owned: list[int]
    part: int

    def fits(self, owner: int, owned: int, part: int, limit: int) -> bool:
        return self.owned[owner] + owned <= limit and self.part + part <= limit


class CheckpointMeasurement:
    """One rank's work on a checkpoint; every public method is called by all ranks.

    ``batch`` is the number of samples of a replicate; ``writer`` writes this rank's layers.
    """

    def __init__(
        self,
        group: RankGroup,
        options: SpectraRequest,
        recipe: Recipe,
        device: torch.device | None,
        data: ReplicateData,
        batch: float,
        writer: RunWriter,
        step: int,
        model: nn.Module,
    ) -> None:
        self.group, self.options, self.recipe, self.device = group, options, recipe, device
        self.data, self.batch, self.writer, self.step, self.model = data, batch, writer, step, model

    def plan(self, layers: Sequence[Layer]) -> tuple[Sweep, ...]:
        """Return the sweeps in which the layers are measured, with their owners."""
        return sweeps(
            [cost(layer.rows, layer.columns) for layer in layers],
            [layer.rows * layer.columns * self._dtype(layer).itemsize for layer in layers],
            replicates=self.options.replicates,
            ranks=self.group.size,
            budget=self.options.budget,
        )

    def sweep(self, layers: Sequence[Layer], sweep: Sweep, report: Callable[[str], None]) -> None:
        """Measure and write the layers of a sweep, reporting progress; errors are raised on every rank."""
        group, options = self.group, self.options
        replicates = self._gradients([layers[i].parameter for i in sweep.layers], report)
        report("sending replicates")
        owned: dict[int, list[Tensor]] = {}
        for index, owner in zip(sweep.layers, sweep.owners, strict=True):
            layer = layers[index]
            of_layer = replicates.pop(layer.parameter)
            gathered = group.gather_at(
                owner,
                [of_layer[r] for r in sorted(of_layer)],
                [replicate % group.size for replicate in range(options.replicates)],
                shape=(layer.rows, layer.columns),
                dtype=self._dtype(layer),
            )
            if owner == group.rank:
                owned[index] = gathered
        problem: tuple[int, Exception] | None = None
        try:
            for number, index in enumerate(sorted(owned), 1):
                report(f"{layers[index].parameter}, {number} of {len(owned) + number - 1}")
                self._layer(layers[index], owned.pop(index))
        except Exception as error:  # noqa: BLE001 - reported on all ranks
            problem = (layers[index].index, error)
        group.raise_first(problem)

    def _gradients(self, names: Sequence[str], report: Callable[[str], None]) -> dict[str, dict[int, Tensor]]:
        """Return this rank's replicates of some layers, by layer and number."""
        group, options = self.group, self.options
        device = self.device or next(self.model.parameters()).device
        by_layer: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        problem: tuple[int, Exception] | None = None
        digests = self.data.digests
        for count, replicate in enumerate(digests):
            report(f"gradient {count + 1} of {len(digests)}")
            try:
                batch = moved(self.data.batch(replicate), device, options.torch_dtype)
                seed_by(options.seed, "loss", replicate)
                matrices_of = gradients(
                    self.model, self.recipe.loss, batch, set(names), self.recipe.split, replicate=replicate
                )
            except SpectraError as error:
                problem = (replicate, error)
                break
            except Exception as error:  # noqa: BLE001 - a user's loss; reported on all ranks
                problem = (
                    replicate,
                    SpectraError(
                        f"replicate {replicate}: loss or backward failed: {type(error).__name__}: {error}"
                    ),
                )
                problem[1].__cause__ = error
                break
            for name, matrix in matrices_of.items():
                by_layer[name][replicate] = matrix
        group.raise_first(problem)
        return by_layer

    def _layer(self, layer: Layer, replicates: list[Tensor]) -> None:
        options, writer, name = self.options, self.writer, layer.parameter
        echo = spectral_echo(
            replicates,
            layer=name,
            method=options.method,  # type: ignore[arg-type]  # check() knows it
            max_directions=options.max_directions,
            device=self.device,
            seed=options.seed,
        )
        whole = layer.split_of or name
        weight = matrices(whole, self.recipe.split(whole, self.model.get_parameter(whole).detach()))[name]
        record_arrays(writer, self.step, name, echo)
        # Only now is the layer marked as measured: after a kill between the two it is measured again.
        writer.flush()
        ranks = {"weight": stable_rank(weight, layer=name)}
        record_measured(writer, self.step, name, echo, batch=self.batch, stable_ranks=ranks)
        writer.flush()
        if writer.lost is not None:
            raise SpectraError(f"{writer.lost}; run the same command again once that is fixed")

    def _dtype(self, layer: Layer) -> torch.dtype:
        """Return the type of a layer's gradient, which is that of its weight."""
        return self.model.get_parameter(layer.split_of or layer.parameter).dtype


BATCH_SHARE = 8
"""Batches may take one in so many bytes of the budget; the others are drawn again for every backward."""


class ReplicateData:
    """Draws the batches of this rank's replicates, seeded; again where they do not fit into memory."""

    def __init__(self, recipe: Recipe, options: SpectraRequest, group: RankGroup) -> None:
        self._recipe, self._replicates, self._seed = recipe, options.replicates, options.seed
        self._free_bytes = options.budget // BATCH_SHARE
        self._kept: dict[int, Any] = {}
        self.digests: dict[int, str | None] = {}
        self.samples: dict[int, int | None] = {}
        for replicate in range(group.rank, options.replicates, group.size):
            batch = self._draw(replicate)
            self.digests[replicate], self.samples[replicate] = digest(batch), samples(batch)
            if nbytes(batch) <= self._free_bytes:
                self._free_bytes -= nbytes(batch)
                self._kept[replicate] = batch

    def batch(self, replicate: int) -> Any:
        """Return the batch of a replicate; raise SpectraError if drawing it again gives another one."""
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
            f"each of the {self._replicates} replicates needs a batch of different data"
        )


def check_data(group: RankGroup, recipe: Recipe, data: ReplicateData) -> tuple[float, str]:
    """Check that all replicates have batches of one size with different data; same result on all ranks.

    Returned are the samples of a batch, NaN where unknown, and a digest of all batches, empty where they
    cannot be hashed.

    Raises
    ------
    SpectraError
        If two batches differ in size, or are the same.
    """
    sizes: dict[int, int | None] = {}
    digests: dict[int, str | None] = {}
    for theirs, others in group.all_gather((data.samples, data.digests)):
        sizes |= theirs
        digests |= others
    for replicate in sorted(sizes):
        if sizes[replicate] != sizes[0]:
            raise SpectraError(
                f"{recipe.path}: the batch of replicate {replicate} has {sizes[replicate]} samples, that of "
                f"replicate 0 has {sizes[0]}; replicates need batches of one size (drop_last=True, or fewer "
                "--replicates)"
            )
    first: dict[str, int] = {}
    for replicate in sorted(digests):
        digest = digests[replicate]
        if digest is None:
            continue
        if digest in first:
            raise SpectraError(
                f"{recipe.path}: replicates {first[digest]} and {replicate} got the same batch, and would "
                "agree whatever the noise; batches(rank, world_size) must give each rank data of its own"
            )
        first[digest] = replicate
    whole = "" if None in digests.values() else " ".join(str(digests[r]) for r in sorted(digests))
    return (math.nan if sizes[0] is None else float(sizes[0])), whole
