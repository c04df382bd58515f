"""Replicates of a step with a single microbatch: its batch split, each part differentiated by itself.

These are forwards and backwards that the training did not have. Gradients are computed without touching
``.grad`` and without the hooks that reduce. Buffers, training modes and the random state of torch are the
caller's to put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backlight.monitors.spectra.instrument.batches import samples
from backlight.monitors.spectra.model.errors import SpectraError

Loss = Callable[[nn.Module, Any], Tensor]


def split(batch: Any, count: int) -> list[Any]:
    """Split a batch into equal parts along the first dimension; what is left over is left out.

    Raises
    ------
    SpectraError
        If it has fewer samples than parts.
    """
    there = samples(batch)
    if there is None or there < count:
        raise SpectraError(f"a batch of {there or 0} samples cannot be split into {count} replicates")
    size = there // count
    return [_part(batch, there, slice(i * size, (i + 1) * size)) for i in range(count)]


def _part(batch: Any, there: int, rows: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[rows] if batch.ndim and len(batch) == there else batch
    if isinstance(batch, Mapping):
        return {key: _part(value, there, rows) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_part(item, there, rows) for item in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def differentiate(
    model: nn.Module,
    loss: Loss,
    parts: Sequence[Any],
    leaves: Mapping[str, Tensor],
    take: Callable[[dict[str, Tensor]], None],
) -> None:
    """Compute the gradients of each part, and hand them over by name, of the leaves that it uses.

    Parameters
    ----------
    model
        What ``loss`` is called with; not a wrapper that communicates.
    loss
        ``loss(model, part)``, one element.
    parts
        Of a batch. Their random numbers differ, as those of microbatches do.
    leaves
        Parameters by name.
    take
        Given the gradients of one part after the other.

    Raises
    ------
    SpectraError
        If the loss has no graph.
    """
    names, inputs = list(leaves), list(leaves.values())
    drawn = random.getstate(), np.random.get_state()  # a loss may augment its data by either
    try:
        with torch.enable_grad():
            for part in parts:
                value = loss(model, part)
                if not value.requires_grad:
                    raise SpectraError(
                        "the loss of samples=(loss_fn, batch) has no graph; it must be computed from "
                        "the parameters"
                    )
                found = torch.autograd.grad(value, inputs, allow_unused=True)
                take({name: g for name, g in zip(names, found, strict=True) if g is not None})
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
