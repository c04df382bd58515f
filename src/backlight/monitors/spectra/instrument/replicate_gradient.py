"""The gradients of one replicate: of a batch of a recipe, or of a part of a watched run's batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backlight.capture.model_state import preserve_state
from backlight.monitors.spectra.instrument.layers import Split, matrices
from backlight.monitors.spectra.settings import SpectraError

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)`` returns one element."""


def seed_by(seed: int, *position: int | str) -> None:
    """Seed the generators of torch, numpy and Python by a position in the measurement."""
    whole = hashlib.blake2b(repr((seed, *position)).encode(), digest_size=8).digest()
    number = int.from_bytes(whole, "little") >> 1
    torch.manual_seed(number)
    np.random.seed(number % 2**32)  # a recipe may draw from any of the three
    random.seed(number)


def differentiate(
    model: nn.Module,
    loss: Loss,
    parts: Sequence[Any],
    leaves: Mapping[str, Tensor],
    on_gradients: Callable[[dict[str, Tensor]], None],
) -> None:
    """Call ``on_gradients`` with the gradients of each part of a batch, by name, of the leaves that it uses.

    These are forward and backward passes that the training did not have, without touching ``.grad`` and
    without the hooks that reduce. ``model`` is no wrapper that communicates; the caller restores its state
    and the random state of torch.

    Raises
    ------
    SpectraError
        If the loss has no graph.
    """
    names, inputs = list(leaves), list(leaves.values())
    states = random.getstate(), np.random.get_state()  # a loss may augment its data by either
    try:
        with torch.enable_grad():
            for part in parts:
                value = loss(model, part)
                if not value.requires_grad:
                    raise SpectraError(
                        "the loss of samples=(loss_fn, batch) has no graph; it must be computed from "
                        "the parameters"
                    )
                grads = torch.autograd.grad(value, inputs, allow_unused=True)
                on_gradients({name: g for name, g in zip(names, grads, strict=True) if g is not None})
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def gradients(
    model: nn.Module, loss: Loss, batch: Any, wanted: Collection[str], split: Split, *, replicate: int
) -> dict[str, Tensor]:
    """Return the gradients ``[rows, columns]`` of the wanted matrices of one batch, on the host, by name.

    The model is left as it was, without gradients; with :func:`seed_by` the result follows from the
    replicate's number alone, whichever process computes it.

    Raises
    ------
    SpectraError
        If the loss has no graph, a matrix gets no gradient, or one holds NaN or infinite values.
    """
    model.zero_grad(set_to_none=True)
    needed = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and any(part in wanted for part in split(name, parameter.detach()))
    }

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]  # torch's
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in needed
    ]
    try:
        with torch.enable_grad(), preserve_state(model):
            value = loss(model, batch)
            if not value.requires_grad:
                raise SpectraError(
                    f"replicate {replicate}: the loss has no graph; it must be computed from the "
                    "parameters, without detach() or no_grad()"
                )
            value.backward()  # type: ignore[no-untyped-call]  # torch's
        gradients_of: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if name in needed:
                gradients_of |= _take_gradient(name, parameter, split, wanted, replicate)
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return gradients_of


def _take_gradient(
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
    out = {}
    for part, matrix in matrices(name, split(name, gradient.detach())).items():
        if part not in wanted:
            continue
        if not bool(torch.isfinite(matrix).all()):
            raise SpectraError(
                f"layer {part!r}: the gradient of replicate {replicate} holds NaN or infinite values; "
                "find their origin with `backlight nan`, or leave the layer out with --exclude"
            )
        host = matrix.to("cpu").contiguous()
        # A view of a fused gradient would keep the whole of it.
        shares = host.untyped_storage().nbytes() > host.nbytes
        out[part] = host.clone() if shares else host
    return out
