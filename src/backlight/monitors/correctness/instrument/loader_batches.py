"""Whether loaders give the same batches again: in every epoch, at every step, or from every worker."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from backlight.capture.batches import tensors_in
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import digest
from backlight.monitors.correctness.instrument.worker_seeds import (
    copied_generator,
    drawn_from,
    worker_seed,
)
from backlight.monitors.correctness.model.facts import NAMED
from backlight.monitors.correctness.rules import repeated_data as facts

EPOCHS = 5
"""Epochs of a loader that are compared."""

BATCHES = 8
"""Batches at the start of an epoch that are compared."""

REPEATS = 4
"""Times that a loader gives its first batch, and no other, before that is reported."""


SHUFFLING = frozenset({"RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler"})
"""Samplers whose order is to differ from epoch to epoch."""


@dataclass
class _Loader:
    """What one loader gave: digests of the first batches of this epoch, and of the one before.

    One that is created anew for each epoch, over the same data set, is the same loader; ``repeats`` is how
    often it then gave the batches of the epoch before.
    """

    sampler: weakref.ref[Any]
    is_renewed: bool = False
    repeats: int = 0
    epochs: int = 0
    this: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    is_trained_on: bool = False
    single: int = 0
    count: int = BATCHES
    rows: dict[str, str | None] = field(default_factory=dict)
    seed: tuple[tuple[str, ...], str, str] | None = None


class LoaderBatches(Check):
    """``repeated_data``: what the loaders give whose batches are followed by a backward.

    A loader is identified by its sampler of indices, which it keeps over all epochs. Another optimizer begins
    another training run, whose order may be that of the one before.
    """

    name = "loader_batches"
    steps = "all"

    def _start(self) -> None:
        self._loaders: dict[int, _Loader] = {}
        self._latest: _Loader | None = None
        self._of_data: dict[tuple[int, str, int], tuple[weakref.ref[Any], _Loader]] = {}

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Loaders that follow are those of another training run."""
        self._of_data.clear()

    @property
    def every_step(self) -> bool:  # type: ignore[override]
        """Whether the first batches of an epoch are not yet complete."""
        loader = self._latest
        return loader is not None and loader.epochs <= EPOCHS and 0 < len(loader.this) < loader.count

    def unrecorded_begin(self) -> None:
        """Batches between may be missed: the next epoch is compared with one whose begin is complete."""
        for loader in self._loaders.values():
            if len(loader.this) < loader.count:
                loader.this = []

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Compare a batch with that of the same number in the last epoch, and with those before it."""
        sampler = getattr(iterator, "_index_sampler", None)
        loader = self._loaders.get(id(sampler))
        if loader is None or loader.sampler() is not sampler:
            try:
                loader = self._loaders[id(sampler)] = self._renewed(
                    sampler, getattr(iterator, "_dataset", None)
                )
            except TypeError:  # a list
                return
        self._latest = loader
        if index == 0:
            loader.epochs += 1
            loader.last, loader.this = loader.this, []
            self._compare_seeds(loader, iterator)
        workers = int(getattr(iterator, "_num_workers", 0) or 0)
        count = loader.count = max(BATCHES, 2 * workers)
        if loader.epochs > EPOCHS or index >= count or index != len(loader.this):
            return
        if index < 2:
            self._look_at_rows(loader, iterator, index, batch)
        batch_digest = digest(batch)
        if batch_digest is None:
            loader.epochs = EPOCHS + 1
            return
        loader.this.append(batch_digest)
        if loader.is_trained_on:
            self._compare_epochs(loader, iterator)
            self._compare_batches(loader, iterator, workers, batch)

    def _renewed(self, sampler: Any, data: Any) -> _Loader:
        """Return the loader that a new sampler belongs to: one whose sampler is gone, of the same data."""
        reference = weakref.ref(sampler)
        key = id(data), kind_of_sampler(sampler), length(sampler)
        of_data, loader = self._of_data.get(key, (None, None))
        if loader is None or of_data is None or of_data() is not data or loader.sampler() is not None:
            loader = _Loader(reference)
            with contextlib.suppress(TypeError):  # data of a list
                self._of_data[key] = weakref.ref(data), loader
        else:
            loader.sampler, loader.is_renewed = reference, True
        return loader

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """The last batch is one to learn from."""
        if self._latest is not None:
            self._latest.is_trained_on = True

    def _compare_epochs(self, loader: _Loader, iterator: Any) -> None:
        this, last = loader.this, loader.last
        if this != last:
            return
        step, sampler, data = self.step, kind_of_sampler(loader.sampler()), data_of(iterator)
        if len(this) > 1 and len(set(this)) > 1:
            loader.repeats += 1
            if sampler in SHUFFLING and loader.repeats > loader.is_renewed:
                self.report(facts.SameOrder(step, sampler, data, len(this), loader.epochs))
        elif len(this) == 1 and length(loader.sampler()) > 1:
            loader.single += 1
            if loader.single == REPEATS - 1:
                self.report(facts.FirstBatchOnly(step, sampler, data, REPEATS))

    def _compare_seeds(self, loader: _Loader, iterator: Any) -> None:
        """Compare the seeds that new workers are given with those of the epoch before."""
        if loader.epochs > EPOCHS or not getattr(iterator, "_num_workers", 0):
            return
        init = None if iterator._persistent_workers else getattr(iterator, "_worker_init_fn", None)
        seed, before = worker_seed(init), loader.seed
        loader.seed = seed
        if seed is None or seed != before or not loader.is_trained_on:
            return
        if drawn := sorted(drawn_from(iterator._dataset) & set(seed[0])):
            self.report(facts.WorkersSeededAgain(self.step, data_of(iterator), tuple(drawn), seed[2]))
            loader.epochs = EPOCHS

    def _compare_batches(self, loader: _Loader, iterator: Any, workers: int, batch: Any) -> None:
        """Compare the batches of the first epoch with one another."""
        this, data = loader.this, getattr(iterator, "_dataset", None)
        if loader.epochs > 1:
            return
        step, kind = self.step, data_of(iterator)
        groups = [set(this[i : i + workers]) for i in range(0, len(this), max(workers, 1))]
        if len(this) == REPEATS and len(set(this)) == 1 and has_equal_samples(batch):
            self.report(facts.ConstantSamples(step, kind, len(this)))
        is_stream = workers > 1 and issubclass(type(data), IterableDataset)
        is_repeated = [len(group) for group in groups] == [1, 1] and groups[0] != groups[1]
        if is_stream and len(this) == 2 * workers and is_repeated:
            self.report(facts.EqualWorkers(step, kind, len(this), workers))
        is_split = workers > 1 and getattr(iterator, "_worker_init_fn", None) is None
        if len(this) == 2 and is_split and (name := copied_generator(data)):
            self.report(facts.CopiedGenerator(step, kind, workers, name))

    def _look_at_rows(self, loader: _Loader, iterator: Any, index: int, batch: Any) -> None:
        """Report fields of one row among fields with as many rows as the loader puts into a batch.

        A row that is the same in the next batch, such as positions, belongs to no sample.
        """
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        if not isinstance(batch, dict) or not isinstance(size, int) or size < 2:
            return
        shapes = {
            key: value.shape for key, value in batch.items() if isinstance(value, Tensor) and value.ndim
        }
        whole = [key for key, shape in shapes.items() if shape[0] == size]
        single = [key for key, shape in shapes.items() if shape[0] == 1 and len(shape) == 2 and shape[1] > 1]
        if len(whole) < 2 or len(whole) + len(single) != len(shapes):
            return
        before, loader.rows = loader.rows, {str(key): digest(batch[key]) for key in single}
        others = tuple(map(str, whole[:NAMED]))
        for key, row in loader.rows.items():
            if index == 1 and before.get(key, row) != row:
                self.report(facts.SingleRow(self.step, key, size, others))


def data_of(iterator: Any) -> str:
    """Return the class of the data set of a loader."""
    return type(getattr(iterator, "_dataset", None)).__name__


def kind_of_sampler(sampler: Any) -> str:
    """Return the class of what chooses the order, inside a sampler of batches."""
    inner = getattr(sampler, "sampler", sampler)
    is_off = getattr(inner, "shuffle", None) is False
    return "SequentialSampler" if is_off else type(inner).__name__


def has_equal_samples(batch: Any) -> bool:
    """Return whether all samples of a batch are equal: then a data set gives one for every index."""
    several = [x for x in tensors_in(batch) if x.ndim and len(x) > 1]
    return bool(several) and all(bool((x == x[:1]).all()) for x in several)


def length(sampler: Any) -> int:
    """Return the batches of an epoch, 0 where unknown."""
    try:
        return len(sampler)
    except TypeError:
        return 0
