"""Whether the batches of one epoch come in the order of the epoch before, or are one batch all the time."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from backlight.capture.batches import leaves
from backlight.monitors.correctness.instrument.check import Check

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

EPOCHS = 5
"""Epochs of a loader that are compared."""

BATCHES = 8
"""Batches at the start of an epoch that are compared."""

VALUES = 256
"""Values of a tensor that stand for it."""

REPEATS = 4
"""Times that a loader gives its first batch, and no other, before that is reported."""


@dataclass
class _Loader:
    """What one loader gave: digests of the first batches of this epoch, and of the one before."""

    sampler: weakref.ref[Any]
    epochs: int = 0
    this: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    is_trained_on: bool = False
    equal_epochs: int = 0
    single: int = 0


class BatchOrder(Check):
    """``same_order_every_epoch``: what the loaders give whose batches are followed by a backward.

    A loader is identified by its sampler of indices, which it keeps over all epochs.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._loaders: dict[int, _Loader] = {}
        self._latest: _Loader | None = None

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Compare a batch with that of the same number in the last epoch."""
        sampler = getattr(iterator, "_index_sampler", None)
        loader = self._loaders.get(id(sampler))
        if loader is None or loader.sampler() is not sampler:
            try:
                loader = self._loaders[id(sampler)] = _Loader(weakref.ref(sampler))
            except TypeError:  # a list
                return
        self._latest = loader
        if index == 0:
            loader.epochs += 1
            loader.last, loader.this = loader.this, []
        if loader.epochs > EPOCHS or index >= BATCHES or index != len(loader.this):
            return
        found = digest(batch)
        if found is None:
            loader.epochs = EPOCHS + 1
            return
        loader.this.append(found)
        self._compare(loader)

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """The last batch is one to learn from."""
        if self._latest is not None:
            self._latest.is_trained_on = True

    def _compare(self, loader: _Loader) -> None:
        this, last = loader.this, loader.last
        if not loader.is_trained_on or this != last:
            return
        facts = {"sampler": kind_of_sampler(loader.sampler()), "batches": len(this)}
        if len(this) > 1 and len(set(this)) > 1:
            loader.equal_epochs += 1
            self.report(
                "same_order_every_epoch", self.run.clock.index, kind="order", epochs=loader.epochs, **facts
            )
        elif len(this) == 1 and length(loader.sampler()) > 1:
            loader.single += 1
            if loader.single == REPEATS - 1:
                self.report(
                    "same_order_every_epoch", self.run.clock.index, kind="batch", epochs=REPEATS, **facts
                )


def kind_of_sampler(sampler: Any) -> str:
    """Return the class of what chooses the order, inside a sampler of batches."""
    inner = getattr(sampler, "sampler", sampler)
    is_off = getattr(inner, "shuffle", None) is False
    return "SequentialSampler" if is_off else type(inner).__name__


def length(sampler: Any) -> int:
    """Return the batches of an epoch, 0 where unknown."""
    try:
        return len(sampler)
    except TypeError:
        return 0


def digest(batch: Any) -> str | None:
    """Return a digest of a sample of a batch's values; None where something in it cannot be read."""
    found = hashlib.blake2b(digest_size=8)
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                return None
            values = leaf.detach().reshape(-1)[:: max(leaf.numel() // VALUES, 1)]
            found.update(repr((tuple(leaf.shape), values.tolist())).encode())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            found.update(np.ascontiguousarray(leaf.reshape(-1)[:: max(leaf.size // VALUES, 1)]).tobytes())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, bool)):
            found.update(repr(leaf).encode())
        else:
            return None
    return found.hexdigest()
