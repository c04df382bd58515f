"""Batches of any form: their size, where they are, and whether two of them are the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, through tuples, lists, mappings and dataclasses, in order."""
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf


def samples(batch: Any) -> int | None:
    """Return the samples of a batch: the length of its first tensor that has one; None without any."""
    return next((len(x) for x in tensors(batch) if x.ndim), None)


def size(batch: Any) -> int:
    """Return the bytes of the tensors of a batch."""
    return sum(x.nbytes for x in tensors(batch))


def digest(batch: Any) -> str | None:
    """Return what tells one batch from another, None where it holds what cannot be told apart."""
    sum_ = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            sum_.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            sum_.update(_bytes(leaf))
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            sum_.update(repr((leaf.dtype, leaf.shape)).encode())
            sum_.update(np.ascontiguousarray(leaf).tobytes())
        elif leaf is None or isinstance(leaf, (str, bytes, int, float, bool)):
            sum_.update(repr(leaf).encode())
        else:
            return None
    return sum_.hexdigest()


def of_weights(state: Mapping[str, Tensor]) -> str:
    """Return what tells one state of a model from another."""
    sum_ = hashlib.blake2b(digest_size=16)
    for name, value in state.items():
        sum_.update(repr((name, value.dtype, tuple(value.shape))).encode())
        sum_.update(_bytes(value))
    return sum_.hexdigest()


def moved(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a batch with its tensors on a device, floating ones in ``dtype`` if one is given."""
    if isinstance(batch, Tensor):
        floating = dtype is not None and batch.is_floating_point()
        return batch.to(device, dtype) if floating else batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(item, device, dtype) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(item, device, dtype) for item in batch)
    if isinstance(batch, dict):
        return {key: moved(value, device, dtype) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: moved(getattr(batch, f.name), device, dtype) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    # What knows how to move itself, such as the batches of tokenizers.
    return batch.to(device) if hasattr(batch, "to") else batch


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key in batch:
            yield from _leaves(batch[key])
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name))
    else:
        yield batch


def _bytes(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
