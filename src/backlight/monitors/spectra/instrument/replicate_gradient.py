"""The gradient of one replicate: one batch, one backward, only the matrices that are wanted kept.

What a replicate is follows from its number alone: its random numbers are seeded by it, and buffers of the
model, which a forward pass may change, are put back after it. So it does not matter which process computes
it, nor after which others.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backlight.monitors.spectra.instrument.layers import Split, matrices
from backlight.monitors.spectra.model.errors import SpectraError

Loss = Callable[[nn.Module, Any], Tensor]


def seed_by(seed: int, *place: int | str) -> None:
    """Seed the generators of torch, numpy and Python by a place in the measurement."""
    whole = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    number = int.from_bytes(whole, "little") >> 1
    torch.manual_seed(number)
    np.random.seed(number % 2**32)  # what a recipe draws from is not ours to choose
    random.seed(number)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers of a model back at the end."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])


def gradients(
    model: nn.Module, loss: Loss, batch: Any, wanted: Collection[str], split: Split, *, replicate: int
) -> dict[str, Tensor]:
    """Return the gradients ``[rows, columns]`` of the wanted matrices on the host, by name.

    Parameters
    ----------
    model
        In the mode in which it is to be measured; afterwards no parameter has a gradient.
    loss
        ``loss(model, batch)``, one element.
    batch
        Where the model is.
    wanted
        Names of matrices, as :func:`backlight.monitors.spectra.instrument.layers.select` gives them.
    split
        What takes a fused weight apart.
    replicate
        What messages call the batch.

    Raises
    ------
    SpectraError
        If the loss has no graph, a matrix gets no gradient, or one holds NaN or infinite values.
    """
    model.zero_grad(set_to_none=True)
    needed = _weights_of(model, wanted, split)
    handles = [
        parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]  # torch's
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in needed
    ]
    try:
        with torch.enable_grad(), kept_buffers(model):
            value = loss(model, batch)
            if not value.requires_grad:
                raise SpectraError(
                    f"replicate {replicate}: the loss has no graph; it must be computed from the "
                    "parameters, without detach() or no_grad()"
                )
            value.backward()  # type: ignore[no-untyped-call]  # torch's
        found: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if name in needed:
                found |= _taken(name, parameter, split, wanted, replicate)
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return found


def _weights_of(model: nn.Module, wanted: Collection[str], split: Split) -> set[str]:
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and any(part in wanted for part in split(name, parameter.detach()))
    }


def _taken(
    name: str, parameter: nn.Parameter, split: Split, wanted: Collection[str], replicate: int
) -> dict[str, Tensor]:
    gradient = parameter.grad
    if gradient is None:
        raise SpectraError(
            f"layer {name!r}: replicate {replicate} gave it no gradient; it is not used in that batch. "
            f"Leave it out with --exclude {name!r}, or see `backlight why-no-grad`"
        )
    parameter.grad = None
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    those = matrices(name, split(name, gradient.detach()))
    out = {}
    for part, matrix in those.items():
        if part not in wanted:
            continue
        if not bool(torch.isfinite(matrix).all()):
            raise SpectraError(
                f"layer {part!r}: the gradient of replicate {replicate} holds NaN or infinite values; "
                "find their birthplace with `backlight nan`, or leave the layer out with --exclude"
            )
        host = matrix.to("cpu").contiguous()
        # A view of a fused gradient would keep the whole of it.
        shares = host.untyped_storage().nbytes() > host.nbytes
        out[part] = host.clone() if shares else host
    return out


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
