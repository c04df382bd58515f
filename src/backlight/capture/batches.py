"""Batches of any form: nests of tuples, lists, mappings and dataclasses that hold tensors."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import dataloader

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub


# Dataset indices of the batches of DataLoaders, as their samplers gave them.
#
# A loader with workers asks its sampler ahead; a batch is the one that was asked for under the same number.

SPARE = 8
"""Batches that are remembered beyond those that the workers of a loader are ahead."""


@dataclass(slots=True)
class _Asked:
    """What one pass over a sampler has given: how many batches, and the latest of them."""

    sampler: Any
    count: int
    latest: deque[Any]


_ASKED: weakref.WeakKeyDictionary[Any, _Asked] = weakref.WeakKeyDictionary()


def install_sample_indices(hub: Hub, patches: Patches) -> None:
    """Remember what the samplers of loaders give, where torch has the class we know."""
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None or not hasattr(base, "_next_index"):
        return

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def _next_index(self: Any) -> Any:
            indices = original(self)
            if hub.listeners:
                sampler = self.__dict__.get("_sampler_iter")
                asked = _ASKED.get(self)
                if asked is None or asked.sampler is not sampler:  # another epoch
                    ahead = (getattr(self, "_prefetch_factor", 0) or 0) * (
                        getattr(self, "_num_workers", 0) or 0
                    )
                    asked = _ASKED[self] = _Asked(sampler, 0, deque(maxlen=ahead + SPARE))
                asked.count += 1
                asked.latest.append(indices)
            return indices

        return _next_index

    patches.replace(base, "_next_index", wrap)


def indices_of(iterator: Any, number: int) -> Sequence[int] | None:
    """Return the dataset indices of batch ``number`` of a loader's iterator.

    None where they are not known: of a stream, of workers that give batches in any order, of a batch that was
    asked for before watching began, or too long ago.
    """
    asked = _ASKED.get(iterator)
    if asked is None or not getattr(iterator, "_in_order", True):
        return None
    back = asked.count - number
    if not 0 < back <= len(asked.latest):
        return None
    indices = asked.latest[-back]
    indices = indices.tolist() if hasattr(indices, "tolist") else indices
    is_plain = isinstance(indices, (list, tuple)) and all(type(index) is int for index in indices)
    return indices if is_plain else None


MAX_ITEMS = 10**6
"""Items of a batch that are no plain tensors, above which it is taken to contain itself."""


def leaves(batch: Any, kind: type = object) -> list[Any]:
    """Return whatever is not a nest and of a ``kind``, in order; RecursionError for a nest in itself."""
    flat: list[Any] = []
    pending, items = [batch], 0
    while pending:  # without a call per nest: this runs at every forward of a recorded step
        item = pending.pop()
        if isinstance(item, Tensor):
            flat.append(item)
        elif (items := items + 1) > MAX_ITEMS:
            raise RecursionError(f"a batch of more than {MAX_ITEMS} items, or one that contains itself")
        elif isinstance(item, (tuple, list)):
            pending += reversed(item)
        elif isinstance(item, Mapping):
            pending += reversed(list(item.values()))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            pending += [getattr(item, field.name) for field in reversed(dataclasses.fields(item))]
        elif isinstance(item, kind):
            flat.append(item)
    return flat


def tensors_in(batch: Any) -> list[Tensor]:
    """Return every tensor of a batch, in order."""
    return leaves(batch, Tensor)


def plain_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch whose values can be read: dense, real and not empty."""
    dense = [x for x in tensors_in(batch) if type(x) is Tensor and x.layout is torch.strided and x.numel()]
    return [x for x in dense if not x.is_complex()]


def map_leaves(
    batch: Any, change: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool] = lambda _: False
) -> Any:
    """Return the same nest with ``change`` applied to every leaf, and to every nest that ``is_leaf``."""
    if is_leaf(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_leaves(value, change, is_leaf=is_leaf) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [map_leaves(item, change, is_leaf=is_leaf) for item in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        fields = {name: map_leaves(getattr(batch, name), change, is_leaf=is_leaf) for name in names}
        return dataclasses.replace(batch, **fields)
    return change(batch)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest with ``change`` applied to every tensor that has a dimension."""
    return map_leaves(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.ndim else leaf)


def samples(batch: Any) -> int | None:
    """Return the samples of a batch: the length of its first tensor with a dimension; None without one."""
    return next((len(x) for x in tensors_in(batch) if x.ndim), None)


def nbytes(batch: Any) -> int:
    """Return the bytes of the tensors of a batch."""
    return sum(x.nbytes for x in tensors_in(batch))


def split(batch: Any, count: int) -> list[Any]:
    """Split a batch into equal parts, leaving out a remainder; ValueError if it has too few samples."""
    length = samples(batch)
    if length is None or length < count:
        raise ValueError(f"a batch of {length or 0} samples cannot be split into {count} replicates")
    size = length // count

    def rows(begin: int) -> Any:
        return map_tensors(batch, lambda x: x[begin : begin + size] if len(x) == length else x)

    return [rows(i * size) for i in range(count)]


def moved(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a batch with its tensors on a device, floating ones in ``dtype`` if one is given."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (
                leaf.to(device, dtype) if dtype is not None and leaf.is_floating_point() else leaf.to(device)
            )
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    # The batches of tokenizers are mappings that move themselves, and keep their type.
    return map_leaves(
        batch, move, is_leaf=lambda b: isinstance(b, Mapping) and not isinstance(b, dict) and hasattr(b, "to")
    )


def digest(batch: Any) -> str | None:
    """Return a digest of the contents of a batch; None where a leaf cannot be hashed."""
    hasher = hashlib.blake2b(digest_size=16)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            hasher.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            hasher.update(_bytes(leaf))
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            hasher.update(repr((leaf.dtype, leaf.shape)).encode())
            hasher.update(np.ascontiguousarray(leaf).tobytes())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, bool)):
            hasher.update(repr(leaf).encode())
        else:
            return None
    return hasher.hexdigest()


def digest_of_weights(state: Mapping[str, Tensor]) -> str:
    """Return a digest of the parameters and buffers of a model."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, value in state.items():
        hasher.update(repr((name, value.dtype, tuple(value.shape))).encode())
        hasher.update(_bytes(value))
    return hasher.hexdigest()


def _bytes(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
